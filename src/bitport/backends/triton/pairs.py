"""Decode a weight to 16-bit numbers, two codes at a time, for matrix units that multiply bfloat16 or float16.

A register holds two such numbers, and packed instructions compute with both. So codes are extracted from their word in
pairs that are 16 bits apart, and made floats through their bits: ::

    word       c7 c6 c5 c4 | c3 c2 c1 c0                 four bits each; fewer: spread to halves first
    >> 4 p      .. .. .. c4+p | .. .. .. cp              place p of both halves
    & | magic  0x4300 + c4+p | 0x4300 + cp               bfloat16: 128 + code;  float16, 0x6400: 1024 + code

This takes a shift, a logical operation and one or two packed additions per two codes, all exact. The columns of a unit
come out in the order 0 4 1 5 2 6 3 7; x is permuted likewise (``paired``), which does not change the sum. Codebook
codes are looked up instead (entries.py).

The order of statements matters to ptxas: it packs the two halves only if the high one is computed first, and adds
shuffles before and after if a subtrahend other than a constant comes first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bitport.backends.triton.decode import UNIT, bits_of, load_columns, load_word, midpoint_of


@triton.constexpr_function
def magic_of(dot: tl.dtype) -> int:
    """Return the bits of the power of two whose last mantissa bit is worth 1."""
    return 0x4300 if dot == tl.bfloat16 else 0x6400


@triton.constexpr_function
def base_of(dot: tl.dtype) -> float:
    """Return that power of two."""
    return 128.0 if dot == tl.bfloat16 else 1024.0


@triton.constexpr_function
def up_of(dot: tl.dtype) -> int:
    """Return the shift that moves the mantissa of float8_e4m3 to the top of that of ``dot``."""
    return 4 if dot == tl.bfloat16 else 7


@triton.constexpr_function
def lift_of(dot: tl.dtype) -> float:
    """Return the factor from there to the value: two to the difference of the exponent biases."""
    return 2.0 ** (120 if dot == tl.bfloat16 else 8)


@triton.jit
def paired(rows: tl.tensor, OF: tl.constexpr) -> tl.tensor:
    """Permute the columns of [ROWS, COLUMNS] within groups of OF, to the order of ``load_pairs`` (8) or ``load_float8``
    (4)."""
    ROWS: tl.constexpr = rows.shape[0]
    COLUMNS: tl.constexpr = rows.shape[1]
    units = tl.reshape(rows, (ROWS, COLUMNS // OF, 2, OF // 2))
    return tl.reshape(tl.permute(units, (0, 1, 3, 2)), (ROWS, COLUMNS))


@triton.jit
def load_pairs(
    data: tl.tensor,
    row: tl.tensor,
    unit: tl.tensor,
    k: tl.tensor,
    n: tl.tensor,
    row_bytes: tl.tensor,
    zero: tl.tensor,
    factor: tl.tensor,
    NUMBER: tl.constexpr,
    WORDS: tl.constexpr,
    EVEN: tl.constexpr,
    ZERO: tl.constexpr,
    FOLD: tl.constexpr,
    DOT: tl.constexpr,
) -> tl.tensor:
    """Load code - zero as [ROWS, UNITS * 8] of type DOT; with FOLD times ``factor``, which then has that type. ``zero``
    and ``factor`` are as load_blocks returns them. The magic bits are computed from ``n``, whose sign is 0: as a
    constant they would displace the mask in the instruction that masks and merges, and the mask would be moved to a
    register each time. They are made a tensor because an ``n`` of 1 is a Python number to the compiler."""
    BITS: tl.constexpr = bits_of(NUMBER)
    MASK: tl.constexpr = ((1 << BITS) - 1) * 0x10001
    MAGIC: tl.constexpr = magic_of(DOT) * 0x10001
    BASE: tl.constexpr = base_of(DOT)
    word = load_word(data, row, unit, k, row_bytes, NUMBER, WORDS, EVEN)
    if BITS != 4:
        word = (word & ((1 << 4 * BITS) - 1)) | ((word >> (4 * BITS)) << 16)
    place = tl.arange(0, 4) * BITS
    pair = word[:, :, None] >> place[None, None, :]
    pair = (pair & MASK) | (tl.full((), MAGIC, tl.int32) + (n >> 31)).to(tl.uint32)
    high = (pair >> 16).to(tl.uint16).to(DOT, bitcast=True)
    low = pair.to(tl.uint16).to(DOT, bitcast=True)
    if ZERO == "int":
        shift = (zero.to(tl.uint16) | magic_of(DOT)).to(DOT, bitcast=True)
        if not FOLD:
            shift -= BASE
            high = high - BASE
            low = low - BASE
        high = high - shift
        low = low - shift
    else:
        high = high - (BASE + midpoint_of(NUMBER))
        low = low - (BASE + midpoint_of(NUMBER))
    if FOLD:
        high = high * factor
        low = low * factor
    return tl.reshape(tl.join(low, high), (row.shape[0], unit.shape[0] * UNIT))


@triton.jit
def load_float8(
    data: tl.tensor,
    row: tl.tensor,
    unit: tl.tensor,
    k: tl.tensor,
    row_bytes: tl.tensor,
    EVEN: tl.constexpr,
    DOT: tl.constexpr,
) -> tl.tensor:
    """Load float8_e4m3 as [ROWS, UNITS, 8] of type DOT, for a device that does not convert it. Its bits, shifted to
    where those of the larger float are, have too small an exponent, which a multiplication corrects; some are subnormal
    before, which these instructions do not flush. The largest magnitude means NaN: adding one to it carries into the
    next power of two, and from that bit the exponent is filled with ones. Columns come out in the order 0 2 1 3 of each
    four."""
    UP: tl.constexpr = up_of(DOT)
    column = unit[:, None] * UNIT + tl.arange(0, 2)[None, :] * 4
    at = (row * (row_bytes // 4))[:, None, None] + (column // 4)[None]
    word = load_columns(data.to(tl.pointer_type(tl.uint32), bitcast=True) + at, column[None], k, EVEN)
    pair = word[:, :, :, None] >> (tl.arange(0, 2) * 8)[None, None, None, :]
    magnitude = (pair & 0x007F007F) << UP
    beyond = (magnitude + (0x00010001 << UP)) & (0x00800080 << UP)
    if tl.bfloat16 == DOT:
        beyond *= 15
    pair = ((pair & 0x00800080) << 8) | magnitude | beyond
    high = (pair >> 16).to(tl.uint16).to(DOT, bitcast=True) * lift_of(DOT)
    low = pair.to(tl.uint16).to(DOT, bitcast=True) * lift_of(DOT)
    return tl.reshape(tl.join(low, high), (row.shape[0], unit.shape[0], UNIT))


@triton.jit
def in_quads(rows: tl.tensor) -> tl.tensor:
    """Permute the columns of [ROWS, COLUMNS] within four units to the order of ``load_quads``."""
    ROWS: tl.constexpr = rows.shape[0]
    COLUMNS: tl.constexpr = rows.shape[1]
    units = tl.reshape(rows, (ROWS, COLUMNS // (4 * UNIT), 4, 4, 2))
    return tl.reshape(tl.permute(units, (0, 1, 4, 2, 3)), (ROWS, COLUMNS))


@triton.jit
def _bytes(quad: tl.tensor) -> tl.tensor:
    """Split uint32 into int8 [.., 4], lowest byte first."""
    even = tl.join(quad.to(tl.uint8), (quad >> 16).to(tl.uint8))
    odd = tl.join((quad >> 8).to(tl.uint8), (quad >> 24).to(tl.uint8))
    four = tl.join(even, odd)
    return tl.reshape(four, (quad.shape[0], quad.shape[1], 4)).to(tl.int8, bitcast=True)


@triton.jit
def load_quads(
    data: tl.tensor,
    row: tl.tensor,
    unit: tl.tensor,
    k: tl.tensor,
    row_bytes: tl.tensor,
    zero: tl.tensor,
    NUMBER: tl.constexpr,
    WORDS: tl.constexpr,
    EVEN: tl.constexpr,
    ZERO: tl.constexpr,
) -> tl.tensor:
    """Load 4-bit code - zero as int8 [ROWS, UNITS * 8], computed on four bytes of a register at a time: the even codes
    of a word, then the odd ones. Bytes must not borrow from each other, so the subtraction is from 128 + code, and the
    sign bit is inverted afterwards. Of four units come the even codes of each, then the odd ones, so that a thread
    holds a whole word."""
    word = load_word(data, row, unit, k, row_bytes, NUMBER, WORDS, EVEN)
    if ZERO == "int":
        shift = tl.reshape(zero.to(tl.uint32), (zero.shape[0], zero.shape[1])) * 0x01010101
    else:
        shift = tl.full((1, 1), int(midpoint_of(NUMBER)) * 0x01010101, tl.uint32)
    even = (((word & 0x0F0F0F0F) | 0x80808080) - shift) ^ 0x80808080
    odd = ((((word >> 4) & 0x0F0F0F0F) | 0x80808080) - shift) ^ 0x80808080
    both = tl.join(_bytes(even), _bytes(odd))
    units = tl.reshape(both, (row.shape[0], unit.shape[0] // 4, 4, 4, 2))
    return tl.reshape(tl.permute(units, (0, 1, 4, 2, 3)), (row.shape[0], unit.shape[0] * UNIT))
