"""y = x W^T by tiles, on matrix units: one kernel for every weight, for rounded inputs or not, one matrix or experts.

A program computes a BM x BN tile of y, over all of K or one of its splits. PLACE says where the weight's scale is
applied::

    end    one scale per row: after the sum                   y = (x . steps) * scale
    tile   one per row and step along K: to the partial sum   y = sum of (x . steps) * scale
    fold   shorter blocks: to the weight, which is then rounded to the product's type, as the generic kernel does

Likewise ROUNDED for the scale of a rounded x: "row" after the sum, "tile" to the partial sum; "" is none. With ``end``
and ``tile`` both operands are small numbers that the product's type holds exactly. Products of float8 are summed in
float32 step by step, since matrix units keep fewer bits of a longer sum.

The weight is the first operand, and tiles of y are computed as BN x BM: matrix units take at least 16 rows of the first
operand and 8 columns of the second, and from sm90 on they read the first from registers, where it was decoded. With
PAIRS several codes are decoded at a time (pairs.py, entries.py), and float8_e4m3 by the device if it CONVERTS it. Codes
and x are prefetched to shared memory num_stages ahead. If one entry of a scale serves a whole step, the loads are too
short for such copies; they are issued one step ahead instead.

The tiles of all experts are numbered consecutively; the last one of each may be partly empty. A program finds its
expert by counting tiles, so the host need not know where experts end.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from bitport.backends.triton.decode import (
    bits_of,
    kind_of,
    load_blocks,
    load_codes,
    load_columns,
    load_steps,
    scale_value,
    whole_steps,
)
from bitport.backends.triton.entries import apart, load_entries
from bitport.backends.triton.pairs import in_quads, load_float8, load_pairs, load_quads, paired


@triton.jit
def find_expert(
    ends: tl.tensor, tile: tl.tensor, m: tl.tensor, experts: tl.tensor, BM: tl.constexpr, EXPERTS: tl.constexpr
) -> tl.tensor:
    """Return (expert, its first row in ``tile``, its end), all 0 past the last tile. Ends that decrease or exceed the
    number of rows are clamped: results are undefined then, but nothing outside x is read."""
    expert = tl.arange(0, EXPERTS)
    end = tl.minimum(tl.maximum(tl.load(ends + expert, mask=expert < experts, other=0), 0), m)
    before = tl.load(ends + expert - 1, mask=(expert > 0) & (expert < experts), other=0)
    before = tl.minimum(tl.maximum(before, 0), m)
    tiles = (tl.maximum(end - before, 0) + BM - 1) // BM
    first = tl.cumsum(tiles, 0) - tiles
    mine = (tile >= first) & (tile < first + tiles)
    start = before + (tile - first) * BM
    return tl.sum(tl.where(mine, expert, 0), 0), tl.sum(tl.where(mine, start, 0), 0), tl.sum(tl.where(mine, end, 0), 0)


@triton.constexpr_function
def most_together(dot: tl.dtype, columns: int) -> int | None:
    """Return how many of a step's ``columns`` matrix units may sum; None: as the compiler decides. It would have them
    add the total as well: those of sm100 do that in float32, on sm90 it knows that they keep fewer bits of float8, and
    elsewhere it must be told."""
    if dot != tl.float8e4nv or (cuda_capability_geq(9) and not cuda_capability_geq(12)):
        return None
    return columns


@triton.jit
def as_type(value: tl.tensor, DOT: tl.constexpr) -> tl.tensor:
    return value if value.dtype == DOT else value.to(DOT)


@triton.jit
def load_both(
    scale: tl.tensor,
    zero: tl.tensor,
    block: tl.tensor,
    piece: tl.tensor,
    k: tl.tensor,
    scale_row: tl.tensor,
    scale_step: tl.tensor,
    zero_row: tl.tensor,
    UNITS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPAN: tl.constexpr,
    EVEN: tl.constexpr,
    ZERO: tl.constexpr,
    PLACE: tl.constexpr,
) -> tl.tuple:
    """Load the zero of a piece and, unless it is applied at the end, its scale, as load_blocks returns them."""
    shift, factor = 0.0, 1.0
    if ZERO != "none":
        shift = load_blocks(zero, block, piece, k, zero_row, 1, UNITS, BLOCK_K, SPAN, EVEN)
    if PLACE != "end":
        factor = load_blocks(scale, block, piece, k, scale_row, scale_step, UNITS, BLOCK_K, SPAN, EVEN)
    return shift, factor


@triton.jit(do_not_specialize=["m", "x_blocks", "experts", "per_split"])
def tiles(
    x: tl.tensor,
    x_scale: tl.tensor,
    x_scale2: tl.tensor,
    bias: tl.tensor,
    ends: tl.tensor,
    out: tl.tensor,
    m: tl.tensor,
    x_row: tl.tensor,
    x_blocks: tl.tensor,
    experts: tl.tensor,
    per_split: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    data: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    scale2: tl.tensor,
    row_bytes: tl.tensor,
    block_n: tl.tensor,
    scale_row: tl.tensor,
    scale_step: tl.tensor,
    zero_row: tl.tensor,
    data_expert: tl.tensor,
    scale_expert: tl.tensor,
    NUMBER: tl.constexpr,
    WORDS: tl.constexpr,
    FLIP: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PLACE: tl.constexpr,
    ROUNDED: tl.constexpr,
    PAIRS: tl.constexpr,
    CONVERTS: tl.constexpr,
    DOT: tl.constexpr,
    EVEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
) -> None:
    tiles_m = tl.num_programs(0) // ((n + BN - 1) // BN)
    tile_m, tile_n, split = tl.program_id(0) % tiles_m, tl.program_id(0) // tiles_m, tl.program_id(1)
    if ends is None:
        start, stop = tile_m * BM, m
    else:
        expert, start, stop = find_expert(ends, tile_m, m, experts, BM, EXPERTS)
        if start >= stop:
            return
        data += expert.to(tl.int64) * data_expert
        scale += expert.to(tl.int64) * scale_expert
        if ZERO != "none":
            zero += expert.to(tl.int64) * scale_expert
        if scale2 is not None:
            scale2 += expert
    UNITS: tl.constexpr = BK // 8
    INTEGER: tl.constexpr = tl.int8 == DOT
    FLOAT8: tl.constexpr = tl.float8e4nv == DOT
    row_m = start + tl.arange(0, BM)
    row_n = tile_n * BN + tl.arange(0, BN)
    inside_m, inside_n = row_m < stop, row_n < n
    x_at = x + tl.where(inside_m, row_m, start).to(tl.int64)[:, None] * x_row
    row = tl.minimum(row_n, n - 1).to(tl.int64)
    block = row // block_n
    total = tl.zeros((BN, BM), dtype=tl.int32 if INTEGER and PLACE == "end" else tl.float32)
    last = tl.minimum((k + BK - 1) // BK, (split + 1) * per_split)
    if SPAN == "row" or SPAN == "tile":
        next_shift, next_factor = load_both(
            *(scale, zero, block, split * per_split, k, scale_row, scale_step, zero_row),
            *(UNITS, BLOCK_K, SPAN, EVEN, ZERO, PLACE),
        )
    for step in range(split * per_split, last):
        column = step * BK + tl.arange(0, BK)
        unit = step * UNITS + tl.arange(0, UNITS)
        rows = as_type(load_columns(x_at + column[None, :], column[None, :], k, EVEN), DOT)
        if SPAN == "row" or SPAN == "tile":
            shift, factor = next_shift, next_factor
        if SPAN != "row":
            next_shift, next_factor = load_both(
                *(scale, zero, block, step + (SPAN == "tile"), k, scale_row, scale_step, zero_row),
                *(UNITS, BLOCK_K, SPAN, EVEN, ZERO, PLACE),
            )
        if SPAN != "row" and SPAN != "tile":
            shift, factor = next_shift, next_factor
        if PLACE != "end":
            factor = scale_value(factor, SCALE)
        FOLDED: tl.constexpr = PLACE == "fold" and PAIRS and bits_of(NUMBER) != 8
        if FOLDED:
            factor = factor.to(DOT)
        if PAIRS and INTEGER:
            rows = in_quads(rows)
            value = load_quads(data, row, unit, k, row_bytes, shift, NUMBER, WORDS, EVEN, ZERO)
        elif PAIRS and NUMBER == "float8_e4m3" and not CONVERTS:
            rows = paired(rows, 4)
            value = load_float8(data, row, unit, k, row_bytes, EVEN, DOT)
        elif PAIRS and bits_of(NUMBER) == 8:
            codes = load_codes(data, row, unit, k, row_bytes, NUMBER, WORDS, FLIP, EVEN).to(tl.uint8)
            if NUMBER == "float8_e4m3":
                value = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)
            else:
                value = (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
        elif PAIRS and kind_of(NUMBER) != "int":
            rows = apart(rows)
            value = load_entries(data, row, unit, k, row_bytes, factor, NUMBER, WORDS, EVEN, FOLDED, DOT)
        elif PAIRS:
            rows = paired(rows, 8)
            value = load_pairs(
                *(data, row, unit, k, n, row_bytes, shift, factor),
                *(NUMBER, WORDS, EVEN, ZERO, FOLDED, DOT),
            )
        elif FLOAT8 or INTEGER:
            codes = load_codes(data, row, unit, k, row_bytes, NUMBER, WORDS, FLIP, EVEN)
            value = codes.to(tl.uint8).to(tl.float8e4nv, bitcast=True) if FLOAT8 else codes
            if INTEGER:
                value = whole_steps(codes, shift, NUMBER, ZERO)
        else:
            value = load_steps(data, row, unit, k, row_bytes, shift, NUMBER, WORDS, FLIP, EVEN, ZERO, SPAN)
        if PLACE == "fold" and not FOLDED:
            value *= factor
        weight = tl.reshape(as_type(value, DOT), (BN, BK))
        rows = tl.trans(rows)
        if PLACE == "tile" or ROUNDED == "tile" or FLOAT8:
            if INTEGER:
                part = tl.dot(weight, rows).to(tl.float32)
            else:
                most: tl.constexpr = most_together(DOT, BK)
                part = tl.dot(weight, rows, input_precision="ieee", max_num_imprecise_acc=most)
            if PLACE == "tile":
                part *= tl.reshape(factor, (BN, 1))
            if ROUNDED == "tile":
                at = row_m.to(tl.int64) * x_blocks + step
                part *= tl.load(x_scale + at, mask=inside_m, other=0.0)[None, :]
            total += part
        elif INTEGER:
            total = tl.dot(weight, rows, total, out_dtype=tl.int32)
        else:
            total = tl.dot(weight, rows, total, input_precision="ieee")
    result = total.to(tl.float32)
    if PLACE == "end":
        result *= scale_value(tl.load(scale + block * scale_row), SCALE)[:, None]
    if ROUNDED == "row":
        result *= tl.load(x_scale + row_m, mask=inside_m, other=0.0)[None, :]
    if x_scale2 is not None:
        result *= tl.load(x_scale2)
    if scale2 is not None:
        result *= tl.load(scale2)
    if bias is not None:
        result += tl.load(bias + row_n, mask=inside_n, other=0.0).to(tl.float32)[:, None]
    at = (split * m + row_m).to(tl.int64)[None, :] * n + row_n[:, None]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside_m[None, :] & inside_n[:, None])


@triton.jit(do_not_specialize=["splits"])
def combine(
    parts: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    n: tl.tensor,
    splits: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Add the partial sums of the splits, in order, and the bias, for ``count`` results."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    result, further = tl.load(parts + at, mask=inside, other=0.0), at
    for _ in range(1, splits):
        further += count
        result += tl.load(parts + further, mask=inside, other=0.0)
    if bias is not None:
        result += tl.load(bias + at % n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)
