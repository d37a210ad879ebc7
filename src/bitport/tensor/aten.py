"""The aten ops of QTensor for storing, moving, slicing and comparing. Matmuls are in bitport.ops."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bitport import layouts
from bitport.errors import ArgumentError
from bitport.numerics import Quantized
from bitport.tensor.borders import axis_of, check_pieces, check_span, cut_along, is_conv, matrix_like, plain_shapes
from bitport.tensor.dispatch import adding_to
from bitport.tensor.forms import compilable
from bitport.tensor.qtensor import ATEN, INSTEAD, PARTS, QTensor, unsupported

aten = torch.ops.aten

implements = adding_to(ATEN)


@implements(aten.detach.default, aten.alias.default)
def alias(func: Any, q: QTensor, **changes: Any) -> QTensor:
    same = q.map_parts(func, **changes)
    same.piece_of_packed = q.piece_of_packed
    return same


@implements(aten._assert_tensor_metadata.default)
def _assert_metadata(func: Any, q: QTensor, *args: Any, **kwargs: Any) -> None:
    """Recorded by torch.export where ``q.to(dtype)`` is a no-op."""
    func(torch.empty(q.shape, dtype=q.dtype, device="meta"), *args, **{**kwargs, "device": None})


@implements(aten.clone.default)
def _clone(func: Any, q: QTensor, memory_format: Any = None) -> QTensor:
    return q.map_parts(torch.clone)


@implements(aten._pin_memory.default)
def _pin(func: Any, q: QTensor, device: Any = None) -> QTensor:
    return q.map_parts(func)


@implements(aten.is_pinned.default)
def _is_pinned(func: Any, q: QTensor, device: Any = None) -> bool:
    return bool(func(q.qdata))


@implements(aten.record_stream.default)
def _record_stream(func: Any, q: QTensor, stream: Any) -> None:
    """``stream``: another stream that reads ``q``, besides the one it was allocated on."""
    for name in q.__tensor_flatten__()[0]:
        func(getattr(q, name), stream)


@implements(aten._to_copy.default)
def _to_copy(
    func: Any, q: QTensor, dtype: Any = None, device: Any = None, non_blocking: bool = False, **kwargs: Any
) -> QTensor:
    """Cast: stored values do not change. Move to another device: unpack, move the canonical parts, pack."""
    if dtype is not None and not dtype.is_floating_point:
        raise ArgumentError(f"a QTensor stands for a float tensor; it cannot become {dtype}")
    changes = {"dtype": dtype} if dtype is not None else {}
    if device is None or torch.device(device) == q.qdata.device:
        return q.map_parts(torch.clone, **changes)
    plain = q.to_layout("plain")
    moved = plain.map_parts(lambda part: part.to(device, non_blocking=non_blocking), **changes)
    return moved.to_device_layout()


@implements(aten.copy_.default)
def _copy_(func: Any, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(target, QTensor):
        raise ArgumentError(
            "a quantized tensor cannot be copied into a float one: load_state_dict(.., assign=True), or dequantize() it"
        )
    if not isinstance(source, QTensor):
        if _is_value(target, source):
            return target
        raise ArgumentError("a float tensor cannot be copied into a quantized one: quantize it first")
    if target.piece_of_packed:
        raise ArgumentError(
            f"{target!r} is a copy of a part of a packed tensor, so a write into it would not reach that tensor: slice "
            "the plain one, whole.to_layout('plain'). With torch.distributed.checkpoint save and load not the "
            "state_dict itself but bitport.checkpoint.ModelState(model)"
        )
    if source.shape != target.shape or _kind(source) != _kind(target):
        raise ArgumentError(f"cannot copy {source!r} into {target!r}: scheme and shape must be equal")
    fill(target, source)
    return target


def _is_value(q: QTensor, source: Tensor) -> bool:
    """Whether writing ``source`` into the float tensor that ``q`` stands for would change nothing."""
    if source.shape != q.shape or "meta" in (source.device.type, q.device.type):
        return False
    value = q.dequantize()
    return torch.equal(source.to(value), value)


def _kind(q: QTensor) -> tuple[Any, ...]:
    return q.scheme, q.matrix, q.transposed


def fill(target: QTensor, source: QTensor) -> None:
    """Copy the parts of ``source`` into those of ``target`` in-place."""
    moved = source.to_layout("plain").map_parts(lambda part: part.to(target.qdata.device))
    moved = moved.to_layout(target.bits_layout)
    here, there = (_dtypes(q) for q in (target, moved))
    if here != there:
        raise ArgumentError(
            f"cannot copy into {target!r}: its parts are {here}, the source's {there}; "
            f"assign the source instead: load_state_dict(..., assign=True)"
        )
    for name in here:
        getattr(target, name).copy_(getattr(moved, name))


def _dtypes(q: QTensor) -> dict[str, str]:
    return {name: str(getattr(q, name).dtype) for name in q.__tensor_flatten__()[0]}


def checked_dim(tensor: Tensor, dim: int) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise IndexError(f"a tensor of shape {list(tensor.shape)} has no dimension {dim}")
    return dim % tensor.dim()


@implements(aten.t.default)
def _t(func: Any, q: QTensor) -> QTensor:
    return _transpose(func, q, 0, 1)


@implements(aten.transpose.int)
def _transpose(func: Any, q: QTensor, dim0: int, dim1: int) -> QTensor:
    shape = list(q.shape)
    ndim = len(shape)
    if {checked_dim(q, dim0), checked_dim(q, dim1)} != {ndim - 2, ndim - 1} or is_conv(q):
        raise ArgumentError(
            f"a QTensor can only be transposed in its last two dimensions, not {dim0}, {dim1} of {shape}{INSTEAD}"
        )
    shape[-1], shape[-2] = shape[-2], shape[-1]
    return q.replace(shape=tuple(shape), transposed=not q.transposed)


@implements(aten.permute.default)
def _permute(func: Any, q: QTensor, dims: Sequence[int]) -> QTensor:
    ndim = q.dim()
    order = [checked_dim(q, dim) for dim in dims]
    if order == list(range(ndim)):
        return alias(aten.alias.default, q)
    if order != [*range(ndim - 2), ndim - 1, ndim - 2]:
        raise ArgumentError(f"a QTensor can only swap its last two dimensions, not permute by {list(dims)}{INSTEAD}")
    return _transpose(func, q, -1, -2)


@implements(aten.expand.default)
def _expand(func: Any, q: QTensor, size: Sequence[int], **kwargs: Any) -> QTensor:
    """Expand the matrix over a batch without copying, as torch.matmul does for a batched input."""
    shape = torch.empty(q.shape, device="meta").expand(size).shape
    if len(shape) == q.dim() and shape == q.shape:  # ranks first: comparing sizes would specialize a dynamic one
        return alias(aten.alias.default, q)
    if q.batched or is_conv(q) or shape[-2:] != q.shape[-2:]:
        raise ArgumentError(f"a QTensor of shape {[*q.shape]} cannot be expanded to {[*size]}{INSTEAD}")
    return q.replace(shape=tuple(shape), repeated=True)


@implements(aten.slice.Tensor)
def _slice(
    func: Any, q: QTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> QTensor:
    """Slice where ``borders`` allows it. The result views the parts if the layout is plain or can slice its rows."""
    size = q.shape[dim]
    start, end, _ = slice(start, end).indices(size)
    end = max(start, end)
    if step != 1:
        raise ArgumentError(f"a QTensor is sliced with step 1, not {step}{INSTEAD}")
    if (start, end) == (0, size):
        return alias(aten.alias.default, q)
    dim = checked_dim(q, dim)
    axis, shape = axis_of(q, dim), [*q.shape]
    shape[dim] = end - start
    if axis == "batch":
        return _take_batch(q, lambda part: func(part, dim, start, end), tuple(shape))
    # the end sliced off may be just the padding of a collective: then the last block may become short
    room = start == 0 and (q.received or (dim == 0 and q.room > 0))
    check_span(q, dim, start, end, room=room)
    if axis == "n" and (rows := getattr(layouts.layout(q.bits_layout), "rows", None)):
        parts = rows(q.matrix, q.parts, start, end)
        if parts is not None:
            piece = q.replace(parts, matrix=matrix_like(q, shape), shape=tuple(shape))
            piece.piece_of_packed = q.piece_of_packed
            return piece
    return _sliced(compilable(q), dim, start, end)


def _take_batch(q: QTensor, take: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> QTensor:
    """Apply ``take`` to the batch dimensions of the parts; an expanded matrix has none in memory."""
    if q.repeated:
        take(q.scale.new_empty(()).expand(*q.shape[:-2], 1, 1))  # an index out of range is an error here too
        return q.replace(shape=shape)
    data, scale, *rest = (None if part is None else take(part) for part in q.parts)
    assert data is not None
    assert scale is not None
    taken = q.replace(Quantized(data, scale, *rest), shape=shape)
    taken.piece_of_packed = q.piece_of_packed
    return taken


def _sliced(q: QTensor, dim: int, start: int, end: int) -> QTensor:
    def shape(size: int) -> tuple[int, ...]:
        return (*q.shape[:dim], size, *q.shape[dim + 1 :])

    plain = q.to_layout("plain")
    before, through = (plain_shapes(plain, shape(at)) for at in (start, end))
    parts = {name: getattr(plain, name) for name in PARTS}
    for name, at in cut_along(plain, dim).items():
        parts[name] = parts[name].narrow(at, before[name][at], through[name][at] - before[name][at])
    result = plain.with_parts(parts, matrix=matrix_like(q, shape(end - start)), shape=shape(end - start))
    if q.bits_layout == "plain":
        return result
    piece = result.to_device_layout()
    piece.piece_of_packed = not q.received
    return piece


@implements(aten.select.int)
def _select(func: Any, q: QTensor, dim: int, index: int) -> QTensor:
    """A view, but a copy in a program that reads ``index`` from a tensor: torch.export has no names for the offsets of
    the parts then."""
    dim = checked_dim(q, dim)
    if dim >= q.dim() - 2 or is_conv(q):
        raise ArgumentError(
            f"only a batch (expert) can be selected from a QTensor, not dim {dim} of {list(q.shape)}{INSTEAD}"
        )
    shape = [size for at, size in enumerate(q.shape) if at != dim]
    if isinstance(index, torch.SymInt) and torch.compiler.is_exporting():
        at = aten.scalar_tensor(index, dtype=torch.int64, device=q.device)
        return _take_batch(q, lambda part: aten.index.Tensor(part, [None] * dim + [at]), tuple(shape))
    return _take_batch(q, lambda part: func(part, dim, index), tuple(shape))


def of_numbers(indices: Sequence[Tensor | None]) -> bool:
    """Whether it is a mask of several dimensions, which picks single numbers, or rows of several matrices."""
    first = indices[0]
    return first is not None and first.dtype == torch.bool and first.dim() > 1


def take_experts(func: Any, q: QTensor, indices: Sequence[Tensor | None]) -> QTensor:
    if len(indices) != 1 or indices[0] is None or q.dim() < 3 or is_conv(q) or of_numbers(indices):
        raise ArgumentError(
            "a QTensor is indexed by one tensor of ids or a mask along its first dimension (rows of a table, experts); "
            f"its shape is {list(q.shape)}{INSTEAD}"
        )
    at = indices[0]
    shape = (*(at.shape if at.dtype != torch.bool else (int(at.sum()),)), *q.shape[1:])
    return _take_batch(q, lambda part: func(part, [at]), shape)


@implements(aten.unsqueeze.default)
def _unsqueeze(func: Any, q: QTensor, dim: int) -> QTensor:
    """View a matrix as a batch of one."""
    if dim % (q.dim() + 1) or q.batched or is_conv(q):
        raise ArgumentError(
            f"only a matrix can be made a batch (expert), at dim 0, not {list(q.shape)} at dim {dim}{INSTEAD}"
        )
    return _take_batch(q, lambda part: func(part, 0), (1, *q.shape))


@implements(aten.squeeze.dim)
def _squeeze(func: Any, q: QTensor, dim: int) -> Tensor:
    """Squeeze a depthwise convolution's weight [N, 1, width] to a float tensor: state space models such as Mamba pass
    it to kernels of their own, which read its memory."""
    if not is_conv(q):
        unsupported(func, q)
    return func(q.dequantize(), dim)


@implements(aten.unbind.int)
def _unbind(func: Any, q: QTensor, dim: int = 0) -> list[QTensor]:
    return [_select(aten.select.int, q, dim, index) for index in range(q.shape[dim])]


@implements(aten.split.Tensor)
def _split(func: Any, q: QTensor, size: int, dim: int = 0) -> list[QTensor]:
    dim = checked_dim(q, dim)
    spans = equal_spans(q, dim, size)
    if q.pieces and dim == 0 and size * len(q.pieces) == q.shape[0]:
        return list(q.pieces)
    check_pieces(q, dim, size)
    pieces = [_slice(aten.slice.Tensor, q, dim, *span) for span in spans]
    for piece in pieces if dim == 0 else ():
        piece.room = size
    return pieces


def equal_spans(tensor: Tensor, dim: int, size: int) -> list[tuple[int, int]]:
    """(start, end) of each piece; the last may be shorter."""
    total = tensor.shape[dim]
    if size < 1:
        raise ArgumentError(f"a weight is split into pieces of at least 1, not {size}")
    return [(at, min(at + size, total)) for at in range(0, total, size)]


@implements(aten.split_with_sizes.default)
def _split_with_sizes(func: Any, q: QTensor, sizes: Sequence[int], dim: int = 0) -> list[QTensor]:
    return [_slice(aten.slice.Tensor, q, dim, *span) for span in spans_of(q, dim, sizes)]


def spans_of(tensor: Tensor, dim: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """(start, end) of each piece."""
    if min(sizes, default=0) < 0 or sum(sizes) != tensor.shape[dim]:
        raise ArgumentError(
            f"dim {dim} of {list(tensor.shape)} cannot be split into {list(sizes)}: the sizes must sum up to it"
        )
    return [(end - size, end) for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]


@implements(aten.equal.default)
def _equal(func: Any, a: Tensor, b: Tensor) -> bool:
    """Whether two QTensors are bitwise equal, whatever their layouts. False for other tensors: transformers compares a
    quantized head with the float embedding."""
    if not (isinstance(a, QTensor) and isinstance(b, QTensor)):
        return False
    if (a.shape, a.dtype) != (b.shape, b.dtype) or _kind(a) != _kind(b):
        return False
    mine, theirs = a.to_layout("plain"), b.to_layout("plain")
    names = mine.__tensor_flatten__()[0]
    return names == theirs.__tensor_flatten__()[0] and all(
        same_bits(getattr(mine, name), getattr(theirs, name)) for name in names
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(*(part.reshape(-1).view(torch.uint8) for part in (a, b)))


@implements(aten.add.Tensor)
def _add(func: Any, a: Any, b: Any, **kwargs: Any) -> Tensor:
    """Add a float tensor of the same shape; the sum is a float tensor. DoRA computes norms of such sums."""
    if isinstance(a, QTensor) == isinstance(b, QTensor) or getattr(a, "shape", None) != getattr(b, "shape", None):
        unsupported(func, a, b)
    return func(*(each.dequantize() if isinstance(each, QTensor) else each for each in (a, b)), **kwargs)


@implements(aten._foreach_lerp_.Scalar)
def _averaged(func: Any, averages: Sequence[Tensor], tensors: Sequence[Tensor], weight: Any) -> None:
    """Update running averages of a model's weights (AveragedModel); quantized ones must not have changed."""
    floats = []
    for average, tensor in zip(averages, tensors, strict=True):
        if isinstance(average, QTensor) or isinstance(tensor, QTensor):
            _check_unchanged(average, tensor)
        else:
            floats.append((average, tensor))
    if floats:
        func(*map(list, zip(*floats, strict=True)), weight)


@implements(aten.sub.Tensor)
def _sub(func: Any, a: Any, b: Any, **kwargs: Any) -> Tensor:
    """The difference of two equal weights, zeros in a float tensor: on the CPU AveragedModel adds a part of it to the
    average."""
    if not isinstance(a, QTensor) or not isinstance(b, QTensor):
        unsupported(func, a, b)
    _check_unchanged(b, a)
    return torch.zeros_like(a)


def _check_unchanged(average: Tensor, tensor: Tensor) -> None:
    if not isinstance(average, QTensor) or not isinstance(tensor, QTensor) or not torch.equal(average, tensor):
        raise ArgumentError(
            f"{average!r} and {tensor!r} differ, and have no mean: a quantized weight must be the same in an "
            f"average and in its model. Average the float model, or quantize before the average is made"
        )


@implements(aten.empty_like.default)
def _empty_like(func: Any, q: QTensor, dtype: Any = None, device: Any = None, **kwargs: Any) -> Tensor:
    """An uninitialized tensor of the same scheme, to be loaded later, as Module.to_empty() needs. With an explicit
    ``dtype``, a plain tensor."""
    if dtype is not None:
        return _like(func, q, dtype=dtype, device=device or q.qdata.device, **kwargs)
    return q.to_layout("plain").map_parts(lambda part: func(part, device=device)).to_device_layout()


LIKE = (aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like)


@implements(*(op.default for op in LIKE))
def _like(func: Any, q: QTensor, *args: Any, **kwargs: Any) -> Tensor:
    """A float tensor of the same shape, since arbitrary values cannot be quantized."""
    return func(torch.empty(q.shape, dtype=q.dtype, device="meta"), *args, **{"device": q.qdata.device, **kwargs})


@implements(aten.new_empty.default, aten.new_ones.default, aten.new_full.default)
def new_float(func: Any, q: QTensor, *args: Any, dtype: Any = None, device: Any = None, **kwargs: Any) -> Tensor:
    """A float tensor of any shape, by default with the dtype and device of the weight."""
    like = torch.empty(0, dtype=q.dtype, device="meta")
    return func(like, *args, dtype=dtype, device=device or q.qdata.device, **kwargs)
