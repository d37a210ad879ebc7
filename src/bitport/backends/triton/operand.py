"""A weight as kernel arguments: pointers, strides and compile-time constants."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitport.backends.aten import beginning
from bitport.layouts import Matrix
from bitport.numerics import FLOATS, NUMBER_TYPES, ZEROS
from bitport.ops import Weight

LAYOUTS = ("plain", "signed_int8", "plain_int32")
"""Layouts that store the canonical bytes: signed_int8 with the top bit of each inverted, plain_int32 with the scale
transposed."""
SCALES = {torch.float8_e8m0fnu: "e8m0", torch.float8_e4m3fn: "e4m3"}


class WeightTraits(NamedTuple):
    """The properties of a weight that compilation and launch parameters depend on."""

    dtype: str
    n: int
    k: int
    block_n: int
    block_k: int
    layout: str
    scale: torch.dtype
    zero: torch.dtype | None
    words: bool


class Operand(NamedTuple):
    """``pointers`` and ``sizes``: the arguments ``data .. scale_expert`` of every kernel; ``fixed``: its constants."""

    pointers: tuple[Tensor | None, ...]
    sizes: tuple[int, ...]
    fixed: dict[str, Any]


def refuses(weight: Weight) -> str | None:
    if weight.layout not in LAYOUTS:
        return f"the weight must be in layout {', '.join(LAYOUTS[:-1])} or {LAYOUTS[-1]}, not {weight.layout}"
    if weight.dtype == "float8_e8m0":
        return "float8_e8m0 is a type for scales"
    if weight.zero is not None and weight.zero.dtype not in ZEROS:
        return f"zeros must be uint8, float32, bfloat16 or float16, not {weight.zero.dtype}"
    return None if weight.n and weight.k else f"an empty matrix, {weight.n}x{weight.k}, needs no kernel"


def weight_traits(weight: Weight) -> WeightTraits:
    data, scale, zero, _, dtype, n, k, block_n, block_k, layout = weight
    aligned = words(NUMBER_TYPES[dtype].bits, k, data)
    return WeightTraits(
        dtype, n, k, block_n, block_k, layout, scale.dtype, None if zero is None else zero.dtype, aligned
    )


def operand(weight: Weight, traits: WeightTraits, float8: bool = False) -> Operand:
    """Return ``weight`` as kernel arguments. ``float8``: the device converts float8_e4m3 natively."""
    parts = _bytes(weight.data), _bytes(weight.scale), whole(weight.zero), whole(weight.scale2)
    return Operand(parts, *_described(traits, float8))


@functools.lru_cache(4096)
def _described(traits: WeightTraits, float8: bool) -> tuple[tuple[int, ...], dict[str, Any]]:
    row_bytes = (traits.k * NUMBER_TYPES[traits.dtype].bits + 7) // 8
    rows, columns = Matrix(traits.dtype, traits.n, traits.k, traits.block_n, traits.block_k).grid
    transposed = traits.layout == "plain_int32"
    scales = SCALES.get(traits.scale, "float")
    sizes = (
        *(row_bytes, traits.block_n),
        *((1, rows) if transposed else (columns, 1)),
        *(columns, traits.n * row_bytes, rows * columns),
    )
    fixed = {
        "NUMBER": traits.dtype,
        "WORDS": traits.words,
        "FLIP": 0x80 if traits.layout == "signed_int8" else 0,
        "SCALE": "float8" if scales == "e4m3" and float8 else scales,
        "ZERO": "none" if traits.zero is None else "float" if traits.zero.is_floating_point else "int",
    }
    return sizes, fixed


def words(bits: int, k: int, data: Tensor) -> bool:
    """Whether rows are aligned for word loads: words of eight codes, or of 32 bits if no such word exists."""
    if bits in (1, 2, 4):
        return k % 8 == 0 and beginning(data) % bits == 0
    return k * bits % 32 == 0 and beginning(data) % 4 == 0


def whole(part: Tensor | None) -> Tensor | None:
    """Return ``part`` contiguous: kernels use no strides but those of rows."""
    return None if part is None else part.contiguous()


def _bytes(part: Tensor) -> Tensor:
    """Return ``part`` contiguous, with 8-bit floats and codes in words viewed as bytes."""
    part = part.contiguous()
    return part if part.dtype in FLOATS else part.view(torch.uint8)


def reach(weight: Weight | WeightTraits, columns: int) -> dict[str, Any]:
    """Return constants for a kernel that steps by ``columns`` columns: what an entry of the scale covers. If that is
    the whole row, BLOCK_K does not depend on its length, so that no kernel is compiled for each."""
    where = span(weight, columns)
    return {"SPAN": where, "BLOCK_K": 1 if where == "row" else weight.block_k}


def span(weight: Weight | WeightTraits, columns: int) -> str:
    """Return what one entry of the scale is sure to cover, for a kernel that steps by ``columns``: see load_blocks."""
    if weight.block_k >= weight.k:
        return "row"
    if weight.block_k % columns == 0:
        return "tile"
    return "unit" if weight.block_k % 8 == 0 else "column"
