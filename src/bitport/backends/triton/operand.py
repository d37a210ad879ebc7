"""A weight as kernels take it: pointers and strides, and what is fixed when they are compiled."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitport.layouts import Matrix
from bitport.numerics import FLOATS, NUMBER_TYPES, ZEROS
from bitport.ops import Weight

LAYOUTS = ("plain", "signed_int8", "plain_int32")
"""Those that hold the canonical bytes: signed_int8 with the top bit of each inverted, plain_int32 with the scale
transposed."""
SCALES = {torch.float8_e8m0fnu: "e8m0", torch.float8_e4m3fn: "e4m3"}


class Kind(NamedTuple):
    """A weight without its numbers: what kernels are compiled by, and how a launch is laid out."""

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
    """``pointers`` and ``sizes`` are the arguments ``data .. zero_expert`` of every kernel, ``fixed`` its constants."""

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


def kind_of(weight: Weight) -> Kind:
    data, scale, zero, _, dtype, n, k, block_n, block_k, layout = weight
    aligned = words(NUMBER_TYPES[dtype].bits, k, data)
    return Kind(dtype, n, k, block_n, block_k, layout, scale.dtype, None if zero is None else zero.dtype, aligned)


def operand(weight: Weight, kind: Kind, float8: bool = False) -> Operand:
    """``float8``: the device converts float8_e4m3 as such."""
    parts = _bytes(weight.data), _bytes(weight.scale), whole(weight.zero), whole(weight.scale2)
    return Operand(parts, *_described(kind, float8))


@functools.lru_cache(4096)
def _described(kind: Kind, float8: bool) -> tuple[tuple[int, ...], dict[str, Any]]:
    row_bytes = (kind.k * NUMBER_TYPES[kind.dtype].bits + 7) // 8
    rows, columns = Matrix(kind.dtype, kind.n, kind.k, kind.block_n, kind.block_k).grid
    transposed = kind.layout == "plain_int32"
    scales = SCALES.get(kind.scale, "float")
    sizes = (
        *(row_bytes, kind.block_n),
        *((1, rows) if transposed else (columns, 1)),
        *(columns, kind.n * row_bytes, rows * columns),
    )
    fixed = {
        "NUMBER": kind.dtype,
        "WORDS": kind.words,
        "FLIP": 0x80 if kind.layout == "signed_int8" else 0,
        "SCALE": "float8" if scales == "e4m3" and float8 else scales,
        "ZERO": "none" if kind.zero is None else "float" if kind.zero.is_floating_point else "int",
    }
    return sizes, fixed


def words(bits: int, k: int, data: Tensor) -> bool:
    """Whether kernels may read codes by words: those of eight codes, or of 32 bits where there are none."""
    if bits in (1, 2, 4):
        return k % 8 == 0 and data.storage_offset() % bits == 0
    return k * bits % 32 == 0 and data.storage_offset() % 4 == 0


def whole(part: Tensor | None) -> Tensor | None:
    """Entry by entry, as kernels read it: they know no strides but those of rows."""
    return None if part is None else part.contiguous()


def _bytes(part: Tensor) -> Tensor:
    """Contiguous; 8-bit floats, and codes in words, as bytes."""
    part = part.contiguous()
    return part if part.dtype in FLOATS else part.view(torch.uint8)


def reach(weight: Weight | Kind, columns: int) -> dict[str, Any]:
    """Constants that tell a kernel which steps by so many columns how far an entry of the scale reaches. Where that is
    the whole row, its length is none of them: a kernel is not compiled for each."""
    where = span(weight, columns)
    return {"SPAN": where, "BLOCK_K": 1 if where == "row" else weight.block_k}


def span(weight: Weight | Kind, columns: int) -> str:
    """How far one entry of the scale surely reaches, for a kernel that steps by so many columns: see load_blocks."""
    if weight.block_k >= weight.k:
        return "row"
    if weight.block_k % columns == 0:
        return "tile"
    return "unit" if weight.block_k % 8 == 0 else "column"
