"""quantize: round matrices to nearest, in formats whose blocks lie within a row: weights, and the tokens of a cache,
whose parts are written where the next tokens have their place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitport.backends.triton.decode import bits_of, kind_of, midpoint_of, scale_value
from bitport.backends.triton.encode import (
    divided,
    float_code,
    linear_scale,
    nan_of,
    power_of_two,
    qmax_of,
    range_scale,
    to_float,
    whole,
    zero_point,
)
from bitport.backends.triton.fusion import EXACT
from bitport.backends.triton.sizes import cdiv, next_power
from bitport.numerics import NUMBER_TYPES, Format, packed_size
from bitport.numerics.codebooks import midpoints, zero_code
from bitport.numerics.qparams import scale_range
from bitport.ops.convert import parse_format, to_list, with_room

WIDEST, CHUNK, PER_THREAD = 8192, 1024, 16
"""Columns: of the largest block, which a program holds at once; of a program, if blocks are smaller; of a thread."""
KINDS = {"int": (2, 4, 8), "float": (4, 8), "codebook": (4,)}
"""Kind of numbers -> their bits: codes that do not cross the border of a byte."""
RULES = ("even", "rceil")


TABLES = {name: number.table for name, number in NUMBER_TYPES.items() if number.kind == "codebook"}
THRESHOLDS = {name: midpoints(table) for name, table in TABLES.items()}
ZEROS = {name: zero_code(table) for name, table in TABLES.items()}
"""What encodes a codebook: Triton lets a function of constants read tables, but call no function."""


@triton.constexpr_function
def threshold(number: str, at: int) -> float:
    return THRESHOLDS[number][at]


@triton.constexpr_function
def code_of_zero(number: str) -> int:
    return ZEROS[number]


@triton.jit
def encoded(
    steps: tl.tensor, factor: tl.tensor, zero: tl.tensor, NUMBER: tl.constexpr, ZERO: tl.constexpr
) -> tl.tensor:
    """Return the int32 codes of x / scale."""
    if kind_of(NUMBER) == "int":
        QMAX: tl.constexpr = qmax_of(NUMBER)
        if ZERO == "float":
            moved = steps + zero
            near = whole(tl.minimum(tl.maximum(moved, -512.0), 512.0))
            rounded = tl.where(moved == moved, near, zero)
        else:
            near = whole(tl.minimum(tl.maximum(steps, -512.0), 512.0))
            rounded = tl.where(steps == steps, near, 0.0) + zero
        codes = tl.minimum(tl.maximum(rounded, 0.0), QMAX).to(tl.int32)
    elif kind_of(NUMBER) == "codebook":
        codes = tl.zeros(steps.shape, tl.int32)
        for at in tl.static_range(15):
            codes += (steps > threshold(NUMBER, at)).to(tl.int32)
        codes = tl.where(steps == steps, codes, code_of_zero(NUMBER))
    else:
        codes = float_code(to_float(steps, NUMBER), steps, NUMBER)
        codes = tl.where(factor == factor, codes, nan_of(NUMBER))
    return codes


@triton.jit(do_not_specialize=("n", "first"))
def blocks_of_rows(
    x: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    first: tl.tensor,
    out_apart: tl.tensor,
    scale_apart: tl.tensor,
    zero_apart: tl.tensor,
    lowest: tl.tensor,
    highest: tl.tensor,
    end: tl.tensor,
    NUMBER: tl.constexpr,
    SCALE: tl.constexpr,
    RULE: tl.constexpr,
    ZERO: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Quantize BLOCKS blocks of COLUMNS columns in a row; BLOCK is the power of two from there. The parts go to row
    ``first`` + its own of matrices that are ``*_apart`` numbers from each other. ``lowest``, ``highest``: the range of
    float scales; ``end``: where a range with a zero point is clipped."""
    PER_BYTE: tl.constexpr = 8 // bits_of(NUMBER)
    matrix, row = (tl.program_id(0) // n).to(tl.int64), tl.program_id(0) % n
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    within = tl.arange(0, BLOCK)[None, :]
    column = block[:, None] * COLUMNS + within
    held = (within < COLUMNS) & (column < k)
    value = tl.load(x + tl.program_id(0).to(tl.int64) * k + column, mask=held, other=0.0).to(tl.float32)
    bad = tl.max((value != value).to(tl.int32), 1)
    number = tl.where(value == value, value, 0.0)
    zero = midpoint_of(NUMBER)
    place = (first + row).to(tl.int64)
    count = (k + COLUMNS - 1) // COLUMNS
    at = place * count + block
    if ZERO == "none":
        most = tl.max(tl.abs(number), 1)
        if SCALE == "e8m0":
            code = power_of_two(most, bad, NUMBER, RULE)
            factor = scale_value(code, "e8m0")
            tl.store(scales + matrix * scale_apart + at, code.to(tl.uint8), mask=block < count)
        else:
            stored = linear_scale(most, bad, lowest, highest, NUMBER).to(scales.dtype.element_ty)
            factor = stored.to(tl.float32)
            tl.store(scales + matrix * scale_apart + at, stored, mask=block < count)
    else:
        QMAX: tl.constexpr = qmax_of(NUMBER)
        low, high = tl.min(tl.minimum(number, 0.0), 1), tl.max(tl.maximum(number, 0.0), 1)
        bad = tl.maximum(bad, (tl.maximum(high, -low) == float("inf")).to(tl.int32))
        low, high = tl.maximum(low, -end), tl.minimum(high, end)
        stored = range_scale(low, high, bad, lowest, highest, QMAX).to(scales.dtype.element_ty)
        factor = stored.to(tl.float32)
        tl.store(scales + matrix * scale_apart + at, stored, mask=block < count)
        zero = zero_point(low, high, bad, factor, QMAX)
        if ZERO == "int":
            zero = whole(zero)
        kept = zero.to(zeros.dtype.element_ty)
        tl.store(zeros + matrix * zero_apart + at, kept, mask=block < count)
        zero = kept.to(tl.float32)[:, None]
    steps = divided(value, factor[:, None])
    codes = tl.where(held, encoded(steps, factor[:, None], zero, NUMBER, ZERO), 0)
    if PER_BYTE > 1:
        shifts = tl.arange(0, PER_BYTE) * bits_of(NUMBER)
        codes = tl.sum(tl.reshape(codes, (BLOCKS, BLOCK // PER_BYTE, PER_BYTE)) << shifts[None, None, :], 2)
    byte = tl.arange(0, BLOCK // PER_BYTE)[None, :]
    row_bytes = (k + PER_BYTE - 1) // PER_BYTE
    start = block[:, None] * (COLUMNS // PER_BYTE if COLUMNS % PER_BYTE == 0 else row_bytes) + byte
    inside = (byte * PER_BYTE < COLUMNS) & (start < row_bytes)
    tl.store(out + matrix * out_apart + place * row_bytes + start, codes.to(tl.uint8), mask=inside)


def refuses(value: Tensor, text: str) -> str | None:
    fmt, k = parse_format(text), value.shape[-1]
    number, columns = fmt.number, fmt.block[1] or k
    if not value.numel():
        return f"an empty matrix has nothing to round: {[*value.shape]}"
    if fmt.block[0] != 1:
        return f"blocks must lie within a row, not be {fmt.block[0] or value.shape[-2]}x{columns}"
    if number.bits not in KINDS[number.kind]:
        return f"codes of {fmt.dtype} cross the borders of bytes"
    if min(columns, k) > WIDEST:
        return f"blocks must have at most {WIDEST} columns, not {columns}"
    if columns < k and columns % (8 // number.bits):
        return f"blocks must fill whole bytes, not have {columns} columns of {number.bits} bits"
    if fmt.scale == "e4m3" or (fmt.scale == "e8m0" and fmt.scale_rule not in RULES):
        rules = " or ".join(RULES)
        return f"scales must be floats, or e8m0 by {rules}, not {fmt.scale} by {fmt.scale_rule}"
    return None


def quantize(value: Tensor, text: str) -> list[Tensor]:
    fmt = parse_format(text)
    size = packed_size(value.shape[-1], fmt.number.bits)
    data = torch.empty(*value.shape[:-1], size, dtype=fmt.number.storage, device=value.device)
    parts = with_room(data, value, fmt)
    _launch(value, fmt, 0, *parts[:3])
    return to_list(parts)


def into(value: Tensor, text: str, first: int, data: Tensor, scale: Tensor, zero: Tensor | None) -> bool:
    if not all(part is None or part.is_contiguous() for part in (data, scale, zero)):
        return False
    _launch(value, parse_format(text), first, data, scale, zero)
    return True


def _launch(value: Tensor, fmt: Format, first: int, data: Tensor, scale: Tensor, zero: Tensor | None) -> None:
    """Quantize matrices [.., N, K] into contiguous parts, from their row ``first`` on."""
    x, number, (n, k) = value.contiguous(), fmt.number, value.shape[-2:]
    columns = min(fmt.block[1] or k, k)
    block = next_power(max(columns, 8 // number.bits))
    count = cdiv(k, columns)
    blocks = max(1, min(CHUNK // block, next_power(count)))
    bounds = (
        scale_range(scale.dtype, x.dtype, number.max if zero is None else 1.0) if fmt.scale != "e8m0" else (0.0, 0.0)
    )
    steps = number.qmax
    blocks_of_rows[(x.numel() // k, cdiv(count, blocks))](
        *(x, data.view(torch.uint8), scale.view(torch.uint8) if fmt.scale == "e8m0" else scale, zero),
        *(n, k, first, *(0 if part is None or part.dim() < 3 else part.stride(-3) for part in (data, scale, zero))),
        *bounds,
        torch.finfo(x.dtype).max * (steps / (steps + 2)),
        NUMBER=fmt.dtype,
        SCALE=fmt.scale,
        RULE=fmt.scale_rule,
        ZERO=fmt.zero,
        COLUMNS=columns,
        BLOCK=block,
        BLOCKS=blocks,
        num_warps=max(1, min(8, blocks * block // (32 * PER_THREAD))),
        **EXACT,
    )
