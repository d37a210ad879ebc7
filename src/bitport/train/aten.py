"""The aten ops that do not simply operate on a TrainedTensor's value: storing, slicing, and products below autograd.

A slice is a TrainedTensor of its own and must be rounded like the whole, so it is cut at block boundaries, together
with any fixed scales. Rows that are cut elsewhere, as shards are, can be stored and updated, but are an error in a
product; they keep the scales of the whole, which they will be part of again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bitport.errors import ArgumentError
from bitport.tensor.aten import checked_dim, equal_spans, of_numbers, spans_of
from bitport.tensor.dispatch import adding_to
from bitport.train.fixed import Fixed
from bitport.train.rounded import dense, pre_scaled, rounded_input, rounded_rows
from bitport.train.tensor import ATEN, TrainedTensor, outside_of_products, value_of

aten = torch.ops.aten


implements = adding_to(ATEN)


# -- storing ---------------------------------------------------------------------------------------------------------


@implements(aten.detach.default)
def _detach(func: Any, w: TrainedTensor) -> TrainedTensor:
    """Detaching is never part of a product, so a cast, as by Module.to(), takes effect on the value."""
    value_of(w)
    return _same(func, w)


@implements(
    aten.alias.default,
    aten.clone.default,
    aten.lift_fresh.default,
    aten._pin_memory.default,
)
def _same(func: Any, w: TrainedTensor, **kwargs: Any) -> TrainedTensor:
    return w.map_parts(lambda part: func(part, **kwargs))


@implements(aten.empty_like.default)
def _empty_like(func: Any, w: TrainedTensor, *, device: Any = None, **kwargs: Any) -> TrainedTensor:
    """Used by Module.to_empty(): the value is still to be loaded. The other parts are kept, because the scale of a
    static activation need not be in any checkpoint."""
    value = func(value_of(w), device=device, **kwargs)
    return w.map_beside(lambda part: part.to(device or part.device), value, value.dtype)


@implements(
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.new_empty.default,
    aten.new_ones.default,
    aten.new_full.default,
)
def _floats_like(func: Any, w: TrainedTensor, *args: Any, **kwargs: Any) -> Tensor:
    """Floats of its dtype and device; values are not read, so this is allowed while gradients are recorded."""
    return func(value_of(w), *args, **kwargs)


@implements(aten.copy_.default)
def _copy_(func: Any, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copying one weight in training into another stores it, also while gradients are recorded, as trainers do that
    average models; copied into other floats it would be used outside of products."""
    if not isinstance(target, TrainedTensor) and isinstance(source, TrainedTensor) and source.recorded:
        raise outside_of_products(func)
    func(value_of(target), value_of(source), non_blocking)
    return target


@implements(aten._to_copy.default)
def _to_copy(func: Any, w: TrainedTensor, *, dtype: Any = None, **kwargs: Any) -> Tensor:
    """A cast sets the dtype of products only: codes stay those of the value, and scales keep their dtypes."""
    value = value_of(w)
    if dtype is not None and dtype.is_complex and w.recorded:
        raise outside_of_products(func)
    if dtype is not None and not dtype.is_floating_point:
        return func(value, dtype=dtype, **kwargs)
    return w.map_beside(lambda part: func(part, **kwargs), func(value, **kwargs), dtype or value.dtype)


# -- cutting ---------------------------------------------------------------------------------------------------------


def _dims(w: TrainedTensor, *dims: int) -> tuple[int, ...]:
    return tuple(checked_dim(w, dim) for dim in dims)


def _matrix_dims(w: TrainedTensor) -> tuple[int, int]:
    """The dimensions of N and K."""
    n, k = w.dim() - 2, w.dim() - 1
    return (k, n) if w.rounding.transposed else (n, k)


@implements(aten.t.default)
def _t(func: Any, w: TrainedTensor) -> TrainedTensor:
    return _transpose(aten.transpose.int, w, 0, 1)


@implements(aten.transpose.int)
def _transpose(func: Any, w: TrainedTensor, dim0: int, dim1: int) -> TrainedTensor:
    if set(_dims(w, dim0, dim1)) != {w.dim() - 2, w.dim() - 1} or w.rounding.kind == "conv":
        raise _no_view(w, f"transposed in dimensions {dim0}, {dim1}")
    return w.with_value(func(w.value, dim0, dim1), transposed=not w.rounding.transposed)


@implements(aten.permute.default)
def _permute(func: Any, w: TrainedTensor, dims: Sequence[int]) -> TrainedTensor:
    order = [*_dims(w, *dims)]
    if order == [*range(w.dim())]:
        return w.map_parts(aten.alias.default)
    if order != [*range(w.dim() - 2), w.dim() - 1, w.dim() - 2]:
        raise _no_view(w, f"permuted by {[*dims]}")
    return _transpose(aten.transpose.int, w, -1, -2)


@implements(aten.unsqueeze.default)
def _unsqueeze(func: Any, w: TrainedTensor, dim: int) -> Tensor:
    """Turn a matrix into a batch of one. Any other view can be calculated with under no_grad, but not multiplied."""
    if w.dim() == 2 and dim % 3 == 0 and not w.rounding.cut:
        return w.with_value(func(w.value, 0), _of_matrices(w, lambda part: func(part, 0)))
    if w.recorded:
        raise outside_of_products(func)
    return w.with_value(func(value_of(w), dim), cut=True)


@implements(aten.expand.default)
def _expand(func: Any, w: TrainedTensor, size: Sequence[int], **kwargs: Any) -> Tensor:
    """Repeat a matrix over a batch."""
    shape = torch.empty(w.shape, device="meta").expand(size).shape
    if w.dim() == 2 < len(shape) and shape[-2:] == w.shape and not w.rounding.cut:
        batch = shape[:-2]
        return w.with_value(func(w.value, shape), _of_matrices(w, lambda part: part.expand(*batch, *part.shape)))
    return _view(func, w, size, **kwargs)


@implements(aten.view.default, aten._unsafe_view.default)
def _view(func: Any, w: TrainedTensor, size: Sequence[int], **kwargs: Any) -> Tensor:
    """Another shape loses rows and columns. Optimizers, averages and process groups get a view of the value, FSDP2 of a
    shard."""
    if [*size] == [*w.shape]:
        return w.map_parts(aten.alias.default)
    if w.recorded:
        raise _no_view(w, f"seen as {[*size]}")
    flat = func(value_of(w), size, **kwargs)
    return w.with_value(flat) if w.rounding.cut else flat


@implements(aten.select.int)
def _select(func: Any, w: TrainedTensor, dim: int, index: int) -> TrainedTensor:
    (dim,) = _dims(w, dim)
    if dim >= w.dim() - 2 or w.rounding.kind == "conv":
        raise _no_view(w, f"indexed in dimension {dim}")
    return w.with_value(func(w.value, dim, index), _of_matrices(w, lambda part: func(part, dim, index)))


def _of_matrices(w: TrainedTensor, take: Callable[[Tensor], Tensor]) -> Fixed | None:
    return None if w.fixed is None or w.rounding.cut else w.fixed.of_matrices(take)


@implements(aten.unbind.int)
def _unbind(func: Any, w: TrainedTensor, dim: int = 0) -> list[TrainedTensor]:
    return [_select(aten.select.int, w, dim, index) for index in range(w.shape[dim])]


@implements(aten.index.Tensor)
def _index(func: Any, w: TrainedTensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Select experts of a stack, or look up rows of a table. What a mask of single numbers picks, as optimizers do that
    update some numbers only, are those of the value."""
    if of_numbers(indices):
        if w.recorded:
            raise _no_view(w, "indexed by a mask of several dimensions")
        return func(value_of(w), indices)
    if len(indices) != 1 or indices[0] is None or w.rounding.kind == "conv":
        raise _no_view(w, f"indexed by {len(indices)} indices")
    if w.dim() > 2:
        return w.with_value(func(w.value, indices), _of_matrices(w, lambda part: func(part, indices)))
    return _lookup(w, lambda value: func(value, indices))


_SCALE_FOR_ALL = {
    "rows": "one scale for all rows; a scheme with a scale for each, such as int8-dyn or int4-g32, can be cut so",
    "columns": "one scale for all columns; a scheme with groups of them, such as int4-g32 or int8-g128, can be cut so, "
    "and most others along rows (ColwiseParallel)",
}


@implements(aten.slice.Tensor)
def _slice(
    func: Any, w: TrainedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> TrainedTensor:
    (dim,) = _dims(w, dim)
    size = w.shape[dim]
    start, end, _ = slice(start, end).indices(size)
    end = max(start, end)
    value = func(w.value, dim, start, end, step)
    if (start, end, step) == (0, size, 1):
        return w.with_value(value)
    if w.rounding.kind == "conv" and w.fixed is not None:
        if dim:
            raise _no_view(w, f"cut in dimension {dim}")
        return w.with_value(value, cut=True)
    if dim < w.dim() - 2:
        return w.with_value(value, _of_matrices(w, lambda part: func(part, dim, start, end, step)))
    fmt, along_n = w.scheme.weight, dim == _matrix_dims(w)[0]
    block, what = (fmt.block[0], "rows") if along_n else (fmt.block[1], "columns")
    block = 0 if fmt.global_scale else block
    cut = bool(block == 0 or start % block or (end % block and end != size))
    if step != 1 or (cut and dim):
        raise ArgumentError(
            f"{what} {start}:{end}:{step} of {w!r} do not lie at block borders: it has "
            + (f"the {block} {what} of a block; take blocks that follow each other" if block else _SCALE_FOR_ALL[what])
        )
    if cut:
        return w.with_value(value, cut=True)
    if w.fixed is None or w.rounding.cut:
        return w.with_value(value)
    return w.with_value(value, (w.fixed.of_rows if along_n else w.fixed.of_columns)(start, end, block))


@implements(aten.split.Tensor)
def _split(func: Any, w: TrainedTensor, size: int, dim: int = 0) -> list[TrainedTensor]:
    return [_slice(aten.slice.Tensor, w, dim, *span) for span in equal_spans(w, dim, size)]


@implements(aten.split_with_sizes.default)
def _split_with_sizes(func: Any, w: TrainedTensor, sizes: Sequence[int], dim: int = 0) -> list[TrainedTensor]:
    return [_slice(aten.slice.Tensor, w, dim, *span) for span in spans_of(w, dim, sizes)]


def _no_view(w: TrainedTensor, how: str) -> ArgumentError:
    return ArgumentError(
        f"{w!r} cannot be {how}: that loses its rows and columns, and with them how it is rounded. Leave this weight "
        f"out of the recipe (a rule 'skip'), or use F.linear, F.embedding, a convolution or matmul with its transpose"
    )


# -- products --------------------------------------------------------------------------------------------------------


@implements(
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten.baddbmm.default,
    aten._grouped_mm.default,
    aten.convolution.default,
    aten.convolution_backward.default,
)
def _product(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Multiply with the rounded numbers. The factor along K is the layer's input and is rounded too; the gradient,
    along N, is not."""
    at, w = next((at, arg) for at, arg in enumerate(args) if isinstance(arg, TrainedTensor))
    if w.rounding.gradients is not None:
        raise ArgumentError(
            f"{func} does not round its gradients, as {w!r} asks for: use F.linear, F.grouped_mm or matmul with its "
            f"transpose, or prepare this weight without gradients="
        )
    right, left = w.rounding.transposed and at > 0, not w.rounding.transposed and at == 0
    dtype = next((arg.dtype for arg in args if isinstance(arg, Tensor) and arg is not w), w.dtype)
    given: list[Any] = [dense(arg, dtype) if isinstance(arg, TrainedTensor) else arg for arg in args]
    given[at] = dense(w, dtype, for_pre_scaled=right or left)
    if right:
        given[at - 1] = rounded_input(pre_scaled(given[at - 1], w), w.scheme.act, w.act_scale)
    elif left:
        given[1] = rounded_input(pre_scaled(given[1].mT, w), w.scheme.act, w.act_scale).mT
    return func(*given, **kwargs)


@implements(aten.embedding.default)
def _embedding(func: Any, w: TrainedTensor, ids: Tensor, *rest: Any) -> Tensor:
    return _lookup(w, lambda value: func(value, ids, *rest))


def _lookup(w: TrainedTensor, take: Callable[[Tensor], Tensor]) -> Tensor:
    """Take rows, then round them if they share no scale with others: usually few of many."""
    fmt = w.scheme.weight
    if w.quantized is not None:
        return take(w.quantized)
    if w.rounding.transposed or fmt.block[0] != 1 or fmt.global_scale or w.fixed is not None:
        return take(dense(w, w.dtype))
    rows = take(w.value)
    return rounded_rows(rows.reshape(-1, rows.shape[-1]), fmt, w.dtype).reshape(rows.shape)
