"""The inverse of slicing: concatenate and zero-pad QTensors.

torch slices and pads tensors to shard them over devices, and concatenates them again. Codes and scales are only moved,
never changed: pieces that cannot form one tensor are refused.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bitport.errors import ArgumentError
from bitport.numerics.packing import as_bytes
from bitport.tensor.aten import INSTEAD, alias, checked_dim, implements, new_float, same_bits
from bitport.tensor.borders import check_order, cut_along, matrix_like, plain_shapes, unit
from bitport.tensor.qtensor import PARTS, QTensor

aten = torch.ops.aten


@implements(aten.cat.default)
def _cat(func: Any, pieces: Sequence[Tensor], dim: int = 0) -> QTensor:
    return join(pieces, dim).to_device_layout()


def join(pieces: Sequence[Tensor], dim: int) -> QTensor:
    """Concatenate pieces of the same scheme, in the plain layout. Shared parts must be bitwise equal in all pieces."""
    plain = [piece.to_layout("plain") for piece in pieces if isinstance(piece, QTensor)]
    if len(plain) < len(pieces):
        raise ArgumentError("a quantized tensor is joined with quantized ones only: dequantize() them, or quantize all")
    first = plain[0]
    dim = checked_dim(first, dim)
    if len(plain) > 1:
        check_order(first, dim)
    step, cut = unit(first, dim), cut_along(first, dim)
    for piece in plain:
        if _all_but(dim, piece) != _all_but(dim, first):
            raise ArgumentError(f"{piece!r} cannot be joined with {first!r} along dim {dim}: they are not alike")
    if any(piece.shape[dim] % step for piece in plain[:-1]):
        sizes = [piece.shape[dim] for piece in plain]
        raise ArgumentError(f"pieces of {sizes} of {first!r} cannot be joined: all but the last must be n x {step}")

    def joined(name: str) -> Tensor | None:
        parts = [getattr(piece, name) for piece in plain]
        if parts[0] is None:
            return None
        if name in cut:
            return torch.cat([as_bytes(part) for part in parts], cut[name]).view(parts[0].dtype)
        if not all(same_bits(part, parts[0]) for part in parts):
            raise ArgumentError(
                f"{first!r} cannot be joined along dim {dim}: the pieces differ in {name}, of which a tensor has "
                "only one for all of that dimension"
            )
        return parts[0]

    shape = [*first.shape]
    shape[dim] = sum(piece.shape[dim] for piece in plain)
    parts = {name: joined(name) for name in PARTS}
    return first.with_parts(parts, shape=tuple(shape), matrix=matrix_like(first, shape))


def _all_but(dim: int, q: QTensor) -> tuple[Any, ...]:
    """What must agree in pieces that are joined along ``dim``."""
    kind = (q.scheme, q.transposed, q.repeated, q.batched, q.dtype)
    return [*q.shape[:dim], *q.shape[dim + 1 :]], kind, q.__tensor_flatten__()[0]


@implements(aten.constant_pad_nd.default)
def _pad(func: Any, q: QTensor, pad: Sequence[int], value: float = 0) -> QTensor:
    """Zeros at the end of one dimension: padding for a collective, which is sliced off afterwards. For anyone else only
    where code 0 is the number 0, or the codes have scales of their own, which are 0."""
    at = [index for index, size in enumerate(pad) if size]
    if value or len(at) > 1 or any(index % 2 == 0 or pad[index] < 0 for index in at):
        raise ArgumentError(f"a QTensor is padded only with zeros, at the end of one dimension, not by {list(pad)}")
    if not at:
        return q.replace()
    dim = q.dim() - 1 - at[0] // 2
    apart = "scale" in cut_along(q, dim) and q.shape[dim] % unit(q, dim) == 0
    if not apart and q.scheme.weight.number.kind != "float" and not _is_sharding():
        raise ArgumentError(
            f"{q!r} cannot be padded with zeros in dim {dim}, where what is added would share the last scale, by which "
            f"code 0 is no zero{INSTEAD}"
        )
    return padded(q, dim, q.shape[dim] + pad[at[0]])


def padded(q: QTensor, dim: int, size: int) -> QTensor:
    """``q`` in the plain layout, padded with zero bytes to ``size`` along ``dim``."""
    plain = q.to_layout("plain")
    blank = zeros_like_piece(plain, dim, size)
    for name, at in cut_along(plain, dim).items():
        source = as_bytes(getattr(plain, name))
        as_bytes(getattr(blank, name)).narrow(at, 0, source.shape[at]).copy_(source)
    return blank


def zeros_like_piece(q: QTensor, dim: int, size: int) -> QTensor:
    """A tensor like ``q`` but of ``size`` along ``dim``, in the plain layout, to receive a piece: parts that are cut
    are zero, shared parts are copied."""
    shape = [*q.shape]
    if size != shape[dim]:
        check_order(q, dim)
    shape[dim] = size
    plain, cut, shapes = q.to_layout("plain"), cut_along(q, dim), plain_shapes(q, shape)

    def part(name: str) -> Tensor | None:
        own = getattr(plain, name)
        if own is None or name not in cut:
            return None if own is None else own.clone()
        blank = torch.zeros(math.prod(shapes[name]) * own.itemsize, dtype=torch.uint8, device=own.device)
        return blank.view(own.dtype).view(shapes[name])

    parts = {name: part(name) for name in PARTS}
    made = plain.with_parts(parts, shape=tuple(shape), matrix=matrix_like(q, shape))
    made.room = size
    return made


SHARDING = ("torch.distributed.fsdp._fully_shard._fsdp_param", "torch.distributed.tensor._collective_utils")
"""The modules of FSDP2 and DTensor that pad shards, and allocate buffers for them with new_zeros, and call no user
code."""


def _is_sharding() -> bool:
    return any(frame.f_globals.get("__name__") in SHARDING for frame, _ in traceback.walk_stack(None))


@implements(aten.new_zeros.default)
def _new_zeros(func: Any, q: QTensor, size: Sequence[int], **kwargs: Any) -> Tensor:
    """A float tensor, unless torch is sharding ``q``: only the caller's module tells that from a model's own state."""
    alike = q.dim() > 1 and [*size[1:]] == [*q.shape[1:]]
    if alike and _is_sharding():
        return zeros_like_piece(q, 0, size[0])
    return new_float(func, q, size, **kwargs)


@implements(aten.view.default, aten._unsafe_view.default)
def _view(func: Any, q: QTensor, size: Sequence[int], **kwargs: Any) -> QTensor:
    """Supported views: the same shape; another batch shape of a repeated matrix, as vmap asks for; a flat view of a
    shard, for FSDP2; and moving gathered pieces of one row or matrix each into another dimension, as torch does."""
    if q.room and len(size) == 1 and size[0] in (-1, q.numel()):
        return alias(aten.alias.default, q, shape=(q.numel(),))
    for dim in range(1, q.dim() if q.pieces else 0):
        if [*size] == [1, *q.shape[1:dim], len(q.pieces) * q.shape[dim], *q.shape[dim + 1 :]]:
            return join(q.pieces, dim).to_device_layout()
    known = math.prod(each for each in size if each != -1)
    whole = [q.numel() // max(known, 1) if each == -1 else each for each in size]
    if q.repeated and whole[-2:] == [*q.shape[-2:]] and len(whole) > 2 and math.prod(whole) == q.numel():
        return q.replace(shape=tuple(whole))
    if whole != [*q.shape]:
        advice = INSTEAD if len(size) > 1 else f"{INSTEAD}. For DistributedDataParallel see docs/distributed.md"
        raise ArgumentError(f"a QTensor keeps its shape {list(q.shape)}; it cannot be seen as {list(size)}{advice}")
    return alias(aten.alias.default, q)


@implements(aten.as_strided.default)
def _as_strided(
    func: Any, q: QTensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> QTensor:
    """Supports only the tensor's own size and stride."""
    if [*size] != [*q.shape] or [*stride] != [*q.stride()] or offset:
        raise ArgumentError(f"a QTensor keeps its shape {[*q.shape]}; it cannot be seen as {[*size]} by {[*stride]}")
    return q.replace()
