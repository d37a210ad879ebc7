"""Inputs rounded before a product, in one kernel each: int8 by token or tensor, float8 by token, tensor or 1x128 block,
and the formats of short blocks (mxfp8, mxfp4, nvfp4).

What comes out is made for the product, not for storing: small numbers that int8 or bfloat16 holds exactly, and the
scale apart. A short block's scale is a power of two, or in nvfp4 has four bits, so it can be multiplied in exactly.
Every step is the one of numerics.qparams and numerics.codec in the same float32 arithmetic: the codes are the same, to
the bit, its defined ends included.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitport.backends.triton.decode import bias_of, mantissa_of, scale_value
from bitport.numerics import ACTIVATIONS, NUMBER_TYPES, Format, choose_qparams

SEPARATE = tuple(name for name, fmt in ACTIVATIONS.items() if fmt.block[1] and fmt.scale == "float32")
"""Formats whose rows have several scales that cannot be multiplied in."""
CHUNK = 1024
"""Columns of a row that a program holds at a time."""
TINY = tl.constexpr(2.0**-149)
MAGIC = tl.constexpr(12582912.0)
"""1.5 * 2^23: a float32 of less than 2^22 that it is added to loses its fraction, halves to even."""


class Rounded(NamedTuple):
    """x = rows * scale * scale2; ``place`` is how far an entry of the scale reaches: row, tile (128 columns) or ""."""

    rows: Tensor
    scale: Tensor | None = None
    scale2: Tensor | None = None
    place: str = ""


@triton.constexpr_function
def max_of(number: str) -> float:
    return NUMBER_TYPES[number].max


@triton.constexpr_function
def emax_of(number: str) -> int:
    return NUMBER_TYPES[number].emax


@triton.constexpr_function
def rceil_limit(number: str) -> int:
    """The largest fraction of amax, in units of 2^-23, that needs no larger power of two."""
    return int((NUMBER_TYPES[number].max / 2.0 ** NUMBER_TYPES[number].emax - 1) * 2**23)


@triton.jit
def whole(value: tl.tensor) -> tl.tensor:
    """To the nearest whole number, halves to even; |value| is at most 2^22."""
    return (value + MAGIC) - MAGIC


@triton.jit
def to_float(value: tl.tensor, NUMBER: tl.constexpr) -> tl.tensor:
    """float32 to the nearest value of a small float type, ends clamped, NaN kept: adding 1.5 * 2^23 steps rounds."""
    limit: tl.constexpr = max_of(NUMBER)
    cut = tl.where(value == value, tl.minimum(tl.maximum(value, -limit), limit), value)
    exponent = (cut.to(tl.int32, bitcast=True) >> 23) & 0xFF
    step = tl.maximum(exponent, 128 - bias_of(NUMBER)) - mantissa_of(NUMBER)
    magic = (((step + 23) << 23) | 0x400000).to(tl.float32, bitcast=True)
    return (cut + magic) - magic


@triton.jit
def defined(scale: tl.tensor, amax: tl.tensor, bad: tl.tensor) -> tl.tensor:
    """1 for a block of zeros, NaN for one with a NaN or an infinity."""
    scale = tl.where(amax == 0, 1.0, scale)
    return tl.where((bad > 0) | (amax == float("inf")), float("nan"), scale)


@triton.jit
def power_of_two(amax: tl.tensor, bad: tl.tensor, NUMBER: tl.constexpr, RULE: tl.constexpr) -> tl.tensor:
    """The e8m0 scale of a block."""
    bits = amax.to(tl.int32, bitcast=True)
    position = tl.where(bits < 0x800000, tl.maximum(bits - 0x400000, 0) * 2, bits)
    exponent, fraction = position >> 23, position & 0x7FFFFF
    if RULE == "even":
        exponent += (fraction + (1 << (22 - mantissa_of(NUMBER)))) >> 23
    else:
        exponent += (fraction > rceil_limit(NUMBER)).to(tl.int32)
    code = tl.minimum(tl.maximum(exponent - emax_of(NUMBER), 0), 254 - emax_of(NUMBER))
    return scale_value(tl.where((bad > 0) | (amax == float("inf")), 255, code), "e8m0")


@triton.jit
def by_row(
    x: tl.tensor,
    given: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    k: tl.tensor,
    x_row: tl.tensor,
    highest: tl.tensor,
    widest: tl.tensor,
    NUMBER: tl.constexpr,
    ZERO: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """One program for a row. ``given``: one scale for all instead of the row's own. ``highest``: the largest scale;
    ``widest``: where a range with a zero point is cut."""
    row = tl.program_id(0).to(tl.int64)
    x += row * x_row
    out += row * k
    zero = 0.0
    if given is None:
        low, high = tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32)
        nan = tl.zeros((CHUNK,), tl.int32)
        for first in range(0, k, CHUNK):
            column = first + tl.arange(0, CHUNK)
            value = tl.load(x + column, mask=column < k, other=0.0).to(tl.float32)
            low, high = tl.minimum(low, value), tl.maximum(high, value)
            nan |= (value != value).to(tl.int32)
        least, most, bad = tl.min(low, 0), tl.max(high, 0), tl.max(nan, 0)
        amax = tl.maximum(most, -least)
        if ZERO:
            least, most = tl.maximum(least, -widest), tl.minimum(most, widest)
            raw = tl.div_rn(most * 0.5 - least * 0.5, 127.5)
        else:
            raw = tl.div_rn(amax, tl.full((), max_of(NUMBER), tl.float32))
        scale = defined(tl.minimum(tl.maximum(raw, TINY), highest), amax, bad)
        if ZERO:
            zero = tl.div_rn(-least, scale)
            zero = whole(tl.where(zero == zero, tl.minimum(tl.maximum(zero, 0.0), 255.0), 0.0))
        tl.store(scales + row, scale)
    else:
        scale = tl.load(given)
    for first in range(0, k, CHUNK):
        column = first + tl.arange(0, CHUNK)
        value = tl.load(x + column, mask=column < k, other=0.0).to(tl.float32)
        value = tl.div_rn(value, tl.zeros_like(value) + scale)
        if NUMBER == "int8":
            value = tl.where(value == value, tl.minimum(tl.maximum(value, -512.0), 512.0), 0.0)
            below, above = (-zero, 255.0 - zero) if ZERO else (-128.0, 127.0)
            value = tl.minimum(tl.maximum(whole(value), below), above)
        else:
            value = to_float(value, NUMBER)
        tl.store(out + column, value.to(out.dtype.element_ty), mask=column < k)


@triton.jit
def by_block(
    x: tl.tensor,
    global_scale: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    k: tl.tensor,
    x_row: tl.tensor,
    highest: tl.tensor,
    NUMBER: tl.constexpr,
    SCALE: tl.constexpr,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """BLOCKS blocks of a row. With SCALE float the scale is kept apart, else it is multiplied in."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    value = tl.load(x + row * x_row + column, mask=column < k, other=0.0).to(tl.float32)
    amax, bad = tl.max(tl.abs(value), 1), tl.max((value != value).to(tl.int32), 1)
    if SCALE == "e8m0":
        scale = power_of_two(amax, bad, NUMBER, RULE)
        factor = scale
    else:
        raw = tl.div_rn(amax, tl.zeros_like(amax) + max_of(NUMBER))
        if SCALE == "e4m3":
            second = tl.load(global_scale)
            raw = tl.div_rn(raw, tl.zeros_like(raw) + second)
            scale = to_float(defined(tl.minimum(tl.maximum(raw, 2.0**-9), 448.0), amax, bad), "float8_e4m3")
            factor = scale * second
        else:
            scale = defined(tl.minimum(tl.maximum(raw, TINY), highest), amax, bad)
            factor = scale
    value = to_float(tl.div_rn(value, tl.zeros_like(value) + factor[:, None]), NUMBER)
    if SCALE == "float":
        tl.store(scales + row * ((k + BLOCK - 1) // BLOCK) + block, scale, mask=block * BLOCK < k)
    else:
        value *= scale[:, None]
    tl.store(out + row * k + column, value.to(out.dtype.element_ty), mask=column < k)


def rounded(x: Tensor, act: str, act_scale: Tensor | None, float8: bool = False) -> Rounded:
    """x [M, K], its last dimension contiguous, in an activation format. ``float8``: the product takes it as such."""
    fmt = ACTIVATIONS[act]
    m, k = x.shape
    dtype = torch.bfloat16
    if fmt.dtype == "int8" and fmt.zero == "none":
        dtype = torch.int8
    elif float8 and fmt.dtype == "float8_e4m3" and fmt.scale == "float32":
        dtype = torch.float8_e4m3fn
    rows = torch.empty(m, k, dtype=dtype, device=x.device)
    if fmt.block[1] and fmt.block[0]:
        return _by_block(x, fmt, rows, act_scale)
    given = act_scale
    if fmt.block == (0, 0) and given is None:
        given = choose_qparams(x, fmt)[0]
    scale = None if given is not None else torch.empty(m, dtype=torch.float32, device=x.device)
    widest = torch.finfo(x.dtype).max * (255 / 257)
    largest = fmt.number.max if fmt.zero == "none" else 1.0
    by_row[(m,)](
        *(x, given, rows, scale, k, x.stride(0), _highest(x, largest), widest),
        NUMBER=fmt.dtype,
        ZERO=fmt.zero == "int",
        CHUNK=min(CHUNK, triton.next_power_of_2(k)),
    )
    return Rounded(rows, scale, given, "" if scale is None else "row")


def _by_block(x: Tensor, fmt: Format, rows: Tensor, act_scale: Tensor | None) -> Rounded:
    m, k = x.shape
    block = fmt.block[1]
    count = triton.cdiv(k, block)
    second = act_scale
    if fmt.global_scale and second is None:
        second = choose_qparams(x, fmt)[2]
    scale = torch.empty(m, count, dtype=torch.float32, device=x.device) if fmt.scale == "float32" else None
    blocks = min(CHUNK // block, triton.next_power_of_2(count))
    by_block[(m, triton.cdiv(count, blocks))](
        *(x, second, rows, scale, k, x.stride(0), _highest(x, fmt.number.max)),
        NUMBER=fmt.dtype,
        SCALE=fmt.scale if scale is None else "float",
        RULE=fmt.scale_rule,
        BLOCK=block,
        BLOCKS=blocks,
    )
    return Rounded(rows, scale, second, "" if scale is None else "tile")


def _highest(x: Tensor, largest: float) -> float:
    """The largest scale: its largest code stays finite in x's dtype."""
    limits = torch.finfo(torch.float32)
    return min(limits.max, torch.finfo(x.dtype).max / largest * (1 - limits.eps))
