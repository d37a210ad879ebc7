"""Codes of a weight to numbers of 16 bits, two at a time: for matrix units that multiply bfloat16 or float16.

A register holds two such numbers, and one instruction computes with both. So codes are taken out of their word in pairs
that lie 16 bits apart, and made floats by their bits: ::

    word       c7 c6 c5 c4 | c3 c2 c1 c0                 four bits each; fewer: spread to halves first
    >> 4 p      .. .. .. c4+p | .. .. .. cp              place p of both halves
    & | magic  0x4300 + c4+p | 0x4300 + cp               bfloat16: 128 + code;  float16, 0x6400: 1024 + code

A shift, a logical operation and one or two packed additions for two codes, all exact. The columns of a unit come out as
0 4 1 5 2 6 3 7; x is brought into that order (``paired``): a sum does not mind. Codes that are no whole numbers are
looked up instead (entries.py).

The order of statements matters to ptxas: it packs the two halves only if the high one is computed first, and shuffles
them before and after if a subtrahend other than a constant comes first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bitport.backends.triton.decode import UNIT, bits_of, load_columns, load_word, midpoint_of


@triton.constexpr_function
def magic_of(dot: tl.dtype) -> int:
    """The bits of the power of two whose last place is 1."""
    return 0x4300 if dot == tl.bfloat16 else 0x6400


@triton.constexpr_function
def base_of(dot: tl.dtype) -> float:
    """That power."""
    return 128.0 if dot == tl.bfloat16 else 1024.0


@triton.constexpr_function
def up_of(dot: tl.dtype) -> int:
    """How far a magnitude of float8_e4m3 is moved to have its mantissa at the top of that of ``dot``."""
    return 4 if dot == tl.bfloat16 else 7


@triton.constexpr_function
def lift_of(dot: tl.dtype) -> float:
    """From there to the value: the difference of the biases of the exponents."""
    return 2.0 ** (120 if dot == tl.bfloat16 else 8)


@triton.jit
def paired(rows: tl.tensor, OF: tl.constexpr) -> tl.tensor:
    """[ROWS, COLUMNS] with the columns of each OF in the order of ``load_pairs``, or with 4 of ``load_float8``."""
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
    """[ROWS, UNITS * 8] in DOT: code - zero, with FOLD times ``factor``, which is then of that type; ``zero`` and
    ``factor`` as load_blocks gives them. The magic bits come by way of ``n``, whose sign is 0: as a constant they would
    take the mask's place in the instruction that does both, and the mask would be moved to a register each time. They
    are a tensor, since an ``n`` of 1 is none: the compiler has it as a Python number."""
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
    """[ROWS, UNITS, 8] in DOT: float8_e4m3, for a device that does not convert it. It has the bits of a larger float:
    moved to where those are, they have too small an exponent, which a multiplication lifts. Some are subnormal before,
    which these instructions do not flush. The largest magnitude means NaN: one more is the next power of two, by which
    the exponent is filled up. Of four columns come the first, third, second, fourth."""
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
    """[ROWS, COLUMNS] with the columns of four units in the order of ``load_quads``."""
    ROWS: tl.constexpr = rows.shape[0]
    COLUMNS: tl.constexpr = rows.shape[1]
    units = tl.reshape(rows, (ROWS, COLUMNS // (4 * UNIT), 4, 4, 2))
    return tl.reshape(tl.permute(units, (0, 1, 4, 2, 3)), (ROWS, COLUMNS))


@triton.jit
def _bytes(quad: tl.tensor) -> tl.tensor:
    """int8 [.., 4] of uint32, the lowest first."""
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
    """int8 [ROWS, UNITS * 8]: four-bit code - zero, four in a register: the even codes of a word, then the odd ones. A
    sum on bytes must not carry: it runs on 128 + code, which is its lowest byte's opposite sign. Of four units come the
    even codes of each, then the odd ones, so that a thread has all of a word."""
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
