"""Decode the codes of a weight inside kernels: the one place that knows bit layouts, for all products.

A unit is eight codes along K: as many bytes as a code has bits, and a whole number of bytes for every number type. ::

    int4   one 32-bit word      int2   one 16-bit word      8 bits   eight bytes
    int3, 5, 6, 7: 32-bit words, shifted together; rows that are not aligned to words: byte by byte

Arithmetic is float32 and exact. A code becomes a float through its bits, 0x4B000000 | code = 2^23 + code, since GPUs
convert integers at a fraction of their arithmetic rate; this works at any position in a word (place_steps). No
intermediate float is subnormal, so devices that flush subnormals decode the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bitport.backends.triton.tables import look_up, permutes
from bitport.numerics import NUMBER_TYPES

UNIT = tl.constexpr(8)
SHIFT = tl.constexpr(0x4B000000)
TWO_23 = tl.constexpr(8388608.0)


@triton.constexpr_function
def bits_of(number: str) -> int:
    return NUMBER_TYPES[number].bits


@triton.constexpr_function
def kind_of(number: str) -> str:
    return NUMBER_TYPES[number].kind


@triton.constexpr_function
def midpoint_of(number: str) -> float:
    return NUMBER_TYPES[number].midpoint


@triton.constexpr_function
def mantissa_of(number: str) -> int:
    return NUMBER_TYPES[number].mantissa_bits


@triton.constexpr_function
def bias_of(number: str) -> int:
    return NUMBER_TYPES[number].bias


@triton.constexpr_function
def sign_of(number: str) -> int:
    """Return the sign bit."""
    return 1 << (NUMBER_TYPES[number].bits - 1)


@triton.constexpr_function
def above_finite(number: str) -> int:
    """Return the first magnitude that is not finite; 0 if all are."""
    return 0 if NUMBER_TYPES[number].specials == "none" else NUMBER_TYPES[number].max_code + 1


@triton.constexpr_function
def has_infinity(number: str) -> bool:
    return NUMBER_TYPES[number].specials == "ieee"


@triton.constexpr_function
def entry(number: str, code: int) -> float:
    return NUMBER_TYPES[number].table[code]


@triton.jit
def load_columns(at: tl.tensor, column: tl.tensor, k: tl.tensor, EVEN: tl.constexpr) -> tl.tensor:
    """Load with 0 past the k-th column. EVEN: no column is past it; without a mask the compiler uses vector loads."""
    return tl.load(at) if EVEN else tl.load(at, mask=column < k, other=0.0)


@triton.jit
def _field(word: tl.tensor, PLACE: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    return ((word >> (PLACE * BITS)) & ((1 << BITS) - 1)).to(tl.int32)


@triton.jit
def _every_other(word: tl.tensor, FIRST: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """Return codes FIRST, FIRST + 2, .. of each word, [.., 2, 2]. They are joined, not shifted by a range, so that all
    stay in the thread that loaded the word."""
    low = tl.join(_field(word, FIRST, BITS), _field(word, FIRST + 4, BITS))
    return tl.join(low, tl.join(_field(word, FIRST + 2, BITS), _field(word, FIRST + 6, BITS)))


@triton.jit
def load_word(
    data: tl.tensor,
    row: tl.tensor,
    unit: tl.tensor,
    k: tl.tensor,
    row_bytes: tl.tensor,
    NUMBER: tl.constexpr,
    WORDS: tl.constexpr,
    EVEN: tl.constexpr,
) -> tl.tensor:
    """Load the bits of whole units, first code lowest: [ROWS, UNITS] of uint32, or uint64 for more than four bits. Bits
    above those of the unit are undefined."""
    BITS: tl.constexpr = bits_of(NUMBER)
    if WORDS and UNIT % BITS == 0:
        word_type: tl.constexpr = tl.uint32 if BITS == 4 else tl.uint16 if BITS == 2 else tl.uint8
        at = (row * (row_bytes // BITS))[:, None] + unit[None, :]
        source = data.to(tl.pointer_type(word_type), bitcast=True)
        word = load_columns(source + at, (unit * UNIT)[None, :], k, EVEN).to(tl.uint32)
    elif WORDS:
        first, past = unit * BITS // 4, (unit * BITS % 4 * 8)[None, :]
        at = (row * (row_bytes // 4))[:, None] + first[None, :]
        source, column = data.to(tl.pointer_type(tl.uint32), bitcast=True), (unit * UNIT)[None, :]
        word = load_columns(source + at, column, k, EVEN).to(tl.uint64)
        if BITS == 3:
            word |= tl.load(source + at + 1, mask=(past > 8) & (column < k), other=0).to(tl.uint64) << 32
        else:
            word |= load_columns(source + at + 1, column, k, EVEN).to(tl.uint64) << 32
        word >>= past.to(tl.uint64)
        if BITS == 7:
            rest = tl.load(source + at + 2, mask=(past > 8) & (column < k), other=0).to(tl.uint64)
            word |= (rest << 8) << (56 - past).to(tl.uint64)
        if BITS == 3:
            word = word.to(tl.uint32)
    else:
        wide: tl.constexpr = tl.uint32 if BITS <= 4 else tl.uint64
        word = tl.zeros((row.shape[0], unit.shape[0]), dtype=wide)
        for i in tl.static_range(BITS):
            offset = unit * BITS + i
            at = (row * row_bytes)[:, None] + offset[None, :]
            word |= load_columns(data + at, (offset * 8)[None, :], k * BITS, EVEN).to(wide) << (8 * i)
    return word


@triton.jit
def load_codes(
    data: tl.tensor,
    row: tl.tensor,
    unit: tl.tensor,
    k: tl.tensor,
    row_bytes: tl.tensor,
    NUMBER: tl.constexpr,
    WORDS: tl.constexpr,
    FLIP: tl.constexpr,
    EVEN: tl.constexpr,
) -> tl.tensor:
    """Load codes as int32 [ROWS, UNITS, 8] for ``row`` int64 [ROWS] and ``unit`` [UNITS], an index of units. Codes past
    the k-th of a row read as 0. FLIP: bits that the layout stores inverted."""
    BITS: tl.constexpr = bits_of(NUMBER)
    if BITS == 8:
        column = unit[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
        at = (row * row_bytes)[:, None, None] + column[None]
        codes = load_columns(data + at, column[None], k, EVEN).to(tl.int32)
    else:
        word = load_word(data, row, unit, k, row_bytes, NUMBER, WORDS, EVEN)
        codes = tl.join(_every_other(word, 0, BITS), _every_other(word, 1, BITS))
        codes = tl.reshape(codes, (row.shape[0], unit.shape[0], UNIT))
    return codes ^ FLIP


@triton.jit
def steps(codes: tl.tensor, zero: tl.tensor, NUMBER: tl.constexpr, ZERO: tl.constexpr) -> tl.tensor:
    """Convert codes to float32, before the scale. ZERO: kind of ``zero``, i.e. none, int or float."""
    if kind_of(NUMBER) == "int":
        shifted = (codes | SHIFT).to(tl.float32, bitcast=True)
        if ZERO == "int":
            value = shifted - (zero.to(tl.int32) | SHIFT).to(tl.float32, bitcast=True)
        elif ZERO == "float":
            value = (shifted - TWO_23) - zero.to(tl.float32)
        elif midpoint_of(NUMBER) == 0.5:
            value = (shifted - TWO_23) - 0.5
        else:
            value = shifted - (TWO_23 + midpoint_of(NUMBER))
    elif kind_of(NUMBER) == "codebook":
        value = _entry_of(codes, NUMBER)
    else:
        value = small_float(codes, NUMBER)
    return value


@triton.jit
def place_steps(
    word: tl.tensor, zero: tl.tensor, k: tl.tensor, PLACE: tl.constexpr, NUMBER: tl.constexpr, ZERO: tl.constexpr
) -> tl.tensor:
    """``steps`` for the PLACE-th code of each word of load_word. An integer is not shifted to the lowest bits: merged
    with the bits of 2^23 it is 2^23 + code * 2^position, and one exact fma makes that code - zero. The bits of 2^23 are
    computed from ``k``, whose sign is 0: as a constant they would displace the mask in the instruction that masks and
    merges, and the mask would be moved to a register for each code."""
    BITS: tl.constexpr = bits_of(NUMBER)
    AT: tl.constexpr = PLACE * BITS
    if kind_of(NUMBER) == "int" and midpoint_of(NUMBER) != 0.5:
        FROM: tl.constexpr = 0 if AT + BITS <= 23 else AT // 16 * 16
        POSITION: tl.constexpr = 2.0 ** (AT - FROM)
        bits = (word >> FROM).to(tl.uint32) & (((1 << BITS) - 1) << (AT - FROM))
        value = (bits.to(tl.int32) | (SHIFT + (k >> 31))).to(tl.float32, bitcast=True)
        if ZERO == "int":  # the tensor comes first: Triton 3.7's interpreter fails at constant - tensor
            value = tl.fma(value, 1.0 / POSITION, -zero.to(tl.float32) - TWO_23 / POSITION)
        elif ZERO == "float":
            value = tl.fma(value, 1.0 / POSITION, -TWO_23 / POSITION) - zero.to(tl.float32)
        else:
            value = tl.fma(value, 1.0 / POSITION, -TWO_23 / POSITION - midpoint_of(NUMBER))
    elif kind_of(NUMBER) == "codebook" and permutes():
        value = look_up(word, PLACE, NUMBER)
    else:
        value = steps(_field(word, PLACE, BITS), zero, NUMBER, ZERO)
    return value


@triton.jit
def _two_places(
    word: tl.tensor, zero: tl.tensor, k: tl.tensor, PLACE: tl.constexpr, NUMBER: tl.constexpr, ZERO: tl.constexpr
) -> tl.tensor:
    """Join ``place_steps`` of this place and of the fourth after it."""
    return tl.join(place_steps(word, zero, k, PLACE, NUMBER, ZERO), place_steps(word, zero, k, PLACE + 4, NUMBER, ZERO))


@triton.jit
def load_steps(
    data: tl.tensor,
    row: tl.tensor,
    unit: tl.tensor,
    k: tl.tensor,
    row_bytes: tl.tensor,
    zero: tl.tensor,
    NUMBER: tl.constexpr,
    WORDS: tl.constexpr,
    FLIP: tl.constexpr,
    EVEN: tl.constexpr,
    ZERO: tl.constexpr,
    SPAN: tl.constexpr,
) -> tl.tensor:
    """Load codes as float32, before the scale; ``zero`` as load_blocks returns it for SPAN."""
    if bits_of(NUMBER) == 8 or SPAN == "column":
        value = steps(load_codes(data, row, unit, k, row_bytes, NUMBER, WORDS, FLIP, EVEN), zero, NUMBER, ZERO)
    else:
        word = load_word(data, row, unit, k, row_bytes, NUMBER, WORDS, EVEN)
        if ZERO != "none":
            zero = tl.reshape(zero, (zero.shape[0], zero.shape[1]))
        even = tl.join(_two_places(word, zero, k, 0, NUMBER, ZERO), _two_places(word, zero, k, 2, NUMBER, ZERO))
        odd = tl.join(_two_places(word, zero, k, 1, NUMBER, ZERO), _two_places(word, zero, k, 3, NUMBER, ZERO))
        value = tl.reshape(tl.join(even, odd), (row.shape[0], unit.shape[0], UNIT))
    return value


@triton.jit
def whole_steps(codes: tl.tensor, zero: tl.tensor, NUMBER: tl.constexpr, ZERO: tl.constexpr) -> tl.tensor:
    """Convert codes to int32, before the scale, for integer types whose zero point is an integer."""
    if ZERO == "int":
        value = codes - zero.to(tl.int32)
    else:
        value = codes - int(midpoint_of(NUMBER))
    return value


@triton.jit
def small_float(codes: tl.tensor, NUMBER: tl.constexpr) -> tl.tensor:
    """Convert [sign | exponent | mantissa] to float32. A subnormal 0.m is read as 1.m at the smallest exponent, less
    1.0 there."""
    MANTISSA: tl.constexpr = mantissa_of(NUMBER)
    BIAS: tl.constexpr = bias_of(NUMBER)
    SIGN: tl.constexpr = sign_of(NUMBER)
    magnitude = codes & (SIGN - 1)
    small = magnitude < (1 << MANTISSA)
    lifted = tl.where(small, magnitude | (1 << MANTISSA), magnitude)
    value = ((lifted << (23 - MANTISSA)) + ((127 - BIAS) << 23)).to(tl.float32, bitcast=True)
    value -= tl.where(small, 2.0 ** (1 - BIAS), 0.0)
    if above_finite(NUMBER) > 0:
        value = tl.where(magnitude >= above_finite(NUMBER), float("nan"), value)
        if has_infinity(NUMBER):
            value = tl.where(magnitude == above_finite(NUMBER), float("inf"), value)
    sign = (codes & SIGN) << (32 - bits_of(NUMBER))
    return (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _pick(codes: tl.tensor, BIT: tl.constexpr, low: tl.tensor, high: tl.tensor) -> tl.tensor:
    return tl.where((codes & BIT) != 0, high, low)


@triton.jit
def _four(codes: tl.tensor, NUMBER: tl.constexpr, FIRST: tl.constexpr) -> tl.tensor:
    low = _pick(codes, 1, entry(NUMBER, FIRST), entry(NUMBER, FIRST + 1))
    high = _pick(codes, 1, entry(NUMBER, FIRST + 2), entry(NUMBER, FIRST + 3))
    return _pick(codes, 2, low, high)


@triton.jit
def _entry_of(codes: tl.tensor, NUMBER: tl.constexpr) -> tl.tensor:
    """Select an entry of a table of sixteen by the bits of the code, without reading memory."""
    low = _pick(codes, 4, _four(codes, NUMBER, 0), _four(codes, NUMBER, 4))
    high = _pick(codes, 4, _four(codes, NUMBER, 8), _four(codes, NUMBER, 12))
    return _pick(codes, 8, low, high)


@triton.jit
def scale_value(raw: tl.tensor, SCALE: tl.constexpr) -> tl.tensor:
    """Convert a stored scale to float32. SCALE is e8m0, e4m3 (both as bytes), float8 (e4m3 that the device converts) or
    float."""
    if SCALE == "e8m0":
        code = raw.to(tl.int32)
        bits = tl.where(code == 0, 0x400000, code << 23)
        value = tl.where(code == 255, float("nan"), bits.to(tl.float32, bitcast=True))
    elif SCALE == "e4m3":
        value = small_float(raw.to(tl.int32), "float8_e4m3")
    elif SCALE == "float8":
        value = raw.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)
    else:
        value = raw.to(tl.float32)
    return value


@triton.jit
def load_blocks(
    part: tl.tensor,
    row: tl.tensor,
    piece: tl.tensor,
    k: tl.tensor,
    row_step: tl.tensor,
    step: tl.tensor,
    UNITS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPAN: tl.constexpr,
    EVEN: tl.constexpr,
) -> tl.tensor:
    """Load the entries of a scale or zero for the columns of a piece, i.e. UNITS units of a row. ``row`` [ROWS] indexes
    rows of ``part``, with strides ``row_step`` and ``step``. SPAN is what one entry is sure to cover: row, tile (all
    columns of the piece), unit or column. Adjacent entries are loaded as one vector if EVEN. The result broadcasts to
    [ROWS, UNITS, 8]."""
    at = part + row * row_step
    last = (k - 1) // BLOCK_K
    unit = piece * UNITS + tl.arange(0, UNITS)
    if SPAN == "row":
        entries = tl.load(at)[:, None, None]
    elif SPAN == "tile":
        entries = tl.load(at + tl.minimum(piece * (UNITS * UNIT) // BLOCK_K, last) * step)[:, None, None]
    elif SPAN == "unit" and UNITS * UNIT % BLOCK_K == 0:
        BLOCKS: tl.constexpr = UNITS * UNIT // BLOCK_K
        block = piece * BLOCKS + tl.arange(0, BLOCKS)
        block = block if EVEN else tl.minimum(block, last)
        each = tl.load(at[:, None] + (block * step)[None, :])[:, :, None]
        entries = tl.reshape(tl.broadcast_to(each, (row.shape[0], BLOCKS, UNITS // BLOCKS)), (row.shape[0], UNITS, 1))
    elif SPAN == "unit":
        block = tl.minimum(unit * UNIT // BLOCK_K, last)
        entries = tl.load(at[:, None] + (block * step)[None, :])[:, :, None]
    else:
        column = unit[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
        block = tl.minimum(column // BLOCK_K, last)
        entries = tl.load(at[:, None, None] + (block * step)[None])
    return entries


@triton.jit
def load_flat(
    part: tl.tensor,
    row: tl.tensor,
    piece: tl.tensor,
    k: tl.tensor,
    row_step: tl.tensor,
    step: tl.tensor,
    UNITS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPAN: tl.constexpr,
    EVEN: tl.constexpr,
) -> tl.tensor:
    """``load_blocks`` where entries cover whole units; the result broadcasts to [ROWS, UNITS]."""
    entries = load_blocks(part, row, piece, k, row_step, step, UNITS, BLOCK_K, SPAN, EVEN)
    return tl.reshape(entries, (entries.shape[0], entries.shape[1]))


@triton.jit
def load_place(
    part: tl.tensor,
    row: tl.tensor,
    unit: tl.tensor,
    k: tl.tensor,
    row_step: tl.tensor,
    step: tl.tensor,
    BLOCK_K: tl.constexpr,
    PLACE: tl.constexpr,
) -> tl.tensor:
    """Load the entries for the PLACE-th column of each unit, [ROWS, UNITS], wherever blocks begin."""
    block = tl.minimum(unit * UNIT + PLACE, k - 1) // BLOCK_K
    return tl.load((part + row * row_step)[:, None] + (block * step)[None, :])
