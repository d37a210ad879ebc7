"""Where a QTensor may be cut, and which of its parts are cut with it.

::

    a dimension that     qdata    scale, zero                      scale2    perm         pre_scale   act_scale
    counts matrices      cut      cut                              cut       shared       shared      shared
    is N                 cut      cut, shared if one for all of N  shared    shared       shared      shared
    is K                 cut      cut, shared if one for all of K  shared    not allowed  cut         shared

"Shared": every piece holds all of it. Cuts must lie at block boundaries and, along K, also at byte boundaries and at
boundaries of the blocks in which inputs are rounded: a matmul with some columns then rounds its inputs as the whole
matmul does, unless these have a scale per token or per tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch

from bitport.errors import ArgumentError
from bitport.layouts import Matrix
from bitport.numerics import ACTIVATIONS, number_type
from bitport.tensor.parts import matrix_of, part_specs, rows_and_columns
from bitport.tensor.qtensor import INSTEAD, QTensor

Axis = Literal["batch", "n", "k"]

MOST_LISTED = 64
"""Error messages list device counts that would work up to this one."""


def is_conv(q: QTensor) -> bool:
    return q.dim() > 2 and not q.batched and not q.transposed and not q.repeated


def axis_of(q: QTensor, dim: int) -> Axis:
    """The matrix axis that dimension ``dim`` is. A convolution can be cut along its outputs only."""
    ndim = q.dim()
    dim %= ndim
    if is_conv(q):
        if dim:
            raise ArgumentError("a quantized convolution weight can be sliced along its outputs (dim 0) only")
        return "n"
    if dim < ndim - 2:
        return "batch"
    return "n" if (dim == ndim - 2) != q.transposed else "k"


def cut_along(q: QTensor, dim: int) -> dict[str, int]:
    """The parts that are cut along with ``dim``, each with its own (negative) dimension in the plain layout. The others
    are shared."""
    axis, block = axis_of(q, dim), q.scheme.weight.block
    if axis == "batch":
        at = dim % q.dim() - q.dim()
        cut = {} if q.repeated else {name: at for name in ("qdata", "scale", "zero", "scale2")}
    else:
        at, whole = (-2, block[0] == 0) if axis == "n" else (-1, block[1] == 0)
        cut = {name: at for name in ("qdata", *(() if whole else ("scale", "zero")))}
        if axis == "k":
            cut["pre_scale"] = -1
    return {name: at for name, at in cut.items() if getattr(q, name) is not None}


def unit(q: QTensor, dim: int) -> int:
    """Cuts along ``dim`` must lie at multiples of this."""
    axis, block, number = axis_of(q, dim), q.scheme.weight.block, number_type(q.matrix.dtype)
    if axis == "batch":
        return 1
    if axis == "n":
        return block[0] or 1
    in_bytes = 8 // math.gcd(number.bits, 8) if number.storage == torch.uint8 else 1
    of_inputs = ACTIVATIONS[q.scheme.act].block[1] if q.scheme.act else 0
    return math.lcm(block[1] or 1, of_inputs or 1, in_bytes)


def matrix_like(q: QTensor, shape: Sequence[int]) -> Matrix:
    """The matrix behind a tensor like ``q`` but of ``shape``."""
    shape = tuple(shape[-2:] if q.repeated else shape)
    return matrix_of(q.scheme.weight, *rows_and_columns(shape, q.batched, q.transposed))


def plain_shapes(q: QTensor, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """The shapes of the plain parts of a tensor like ``q`` but of ``shape``."""
    matrix = matrix_like(q, shape)
    batch = tuple(shape[:-2]) if q.batched else ()
    shapes = {name: (*batch, *spec.shape) for name, spec in part_specs(q.scheme.weight, matrix).items()}
    shapes |= {"qdata": shapes.pop("data"), "perm": (matrix.k,), "pre_scale": (matrix.k,)}
    if q.act_scale is not None:
        shapes["act_scale"] = tuple(q.act_scale.shape)
    return {name: size for name, size in shapes.items() if getattr(q, name) is not None}


def check_order(q: QTensor, dim: int) -> None:
    """Raise ArgumentError if ``dim`` is K and its columns are permuted: the permutation holds for all of K only."""
    if q.perm is not None and axis_of(q, dim) == "k":
        raise ArgumentError(
            f"columns of {q!r} are permuted (act-order); it cannot be cut, padded or joined along them: do so with its "
            "rows, or quantize without act-order"
        )


def check_span(q: QTensor, dim: int, start: int, end: int, *, room: bool) -> None:
    """Raise ArgumentError unless start:end can be cut out of ``dim``. With ``room``, only padding follows, into which
    the last block may reach."""
    check_order(q, dim)
    axis, total, step = axis_of(q, dim), q.shape[dim], unit(q, dim)
    if any(at % step and at != total for at in ((start,) if room else (start, end))):
        raise ArgumentError(
            f"{start}:{end} cannot be cut out of dim {dim} of {q!r}: it must begin and end at multiples of {step}, so "
            f"that {_whole(axis)} stay whole{INSTEAD}"
        )


def check_pieces(q: QTensor, dim: int, size: int) -> None:
    """Raise ArgumentError unless ``dim`` can be cut into pieces of ``size`` (the last may be smaller)."""
    axis, total, step = axis_of(q, dim), q.shape[dim], unit(q, dim)
    if size >= total:
        return
    check_order(q, dim)
    if size % step:
        fitting = [str(ways) for ways in range(2, MOST_LISTED + 1) if -(-total // ways) % step == 0]
        ways = f"It can be cut {', '.join(fitting)} ways" if fitting else "No number of equal pieces does that"
        raise ArgumentError(
            f"dim {dim} of {q!r} cannot be cut into pieces of {size}: they must be multiples of {step}, so that "
            f"{_whole(axis)} stay whole. {ways}; a scheme with smaller blocks allows more, and a weight that is not "
            "sharded is not cut"
        )


def _whole(axis: Axis) -> str:
    return "blocks, those of inputs too, and bytes" if axis == "k" else "blocks"
