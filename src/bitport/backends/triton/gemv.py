"""y = x W^T for one row of x, or each of a few, without matrix units and summed in float32.

Each thread decodes and multiplies the codes that it has loaded; threads exchange only the final sums. Words of codes
are not unpacked into a tensor: the sum runs over the eight places of a word one by one, so that a code costs its
extraction and one fma. x is loaded in order and split into places once, for all BN rows of the weight.

Several rows at a time would share decoded numbers, but hold them in registers for each; tiles, on matrix units, decode
once for 16 rows. Where several codes at a time become 16-bit numbers (pairs.py), tiles take fewer instructions even for
one row: ``python -m bench.gpu.instructions`` counts them, and the tables of configs.py choose.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bitport.backends.triton.decode import (
    UNIT,
    bits_of,
    load_blocks,
    load_codes,
    load_columns,
    load_flat,
    load_place,
    load_word,
    place_steps,
    scale_value,
    steps,
)


@triton.jit
def places(rows: tl.tensor, UNITS: tl.constexpr) -> tl.tuple:
    """Split [UNITS, 8] into eight [UNITS]."""
    even, odd = tl.split(tl.reshape(rows, (UNITS, 4, 2)))
    from_0, from_2 = tl.split(tl.reshape(even, (UNITS, 2, 2)))
    from_1, from_3 = tl.split(tl.reshape(odd, (UNITS, 2, 2)))
    p0, p4 = tl.split(from_0)
    p1, p5 = tl.split(from_1)
    p2, p6 = tl.split(from_2)
    p3, p7 = tl.split(from_3)
    return p0, p1, p2, p3, p4, p5, p6, p7


@triton.jit(do_not_specialize=["m", "per_split"])
def gemv(
    x: tl.tensor,
    x_scale: tl.tensor,
    x_scale2: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    m: tl.tensor,
    x_row: tl.tensor,
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
    EVEN: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Compute one row of y for BN rows of the weight."""
    tile_n, split, row_m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    UNITS: tl.constexpr = BK // 8
    row_n = tile_n * BN + tl.arange(0, BN)
    inside_n = row_n < n
    x += row_m.to(tl.int64) * x_row
    row = tl.minimum(row_n, n - 1).to(tl.int64)
    block = row // block_n
    total = tl.zeros((BN, UNITS), dtype=tl.float32)
    last = tl.minimum((k + BK - 1) // BK, (split + 1) * per_split)
    for step in tl.range(split * per_split, last, num_stages=STAGES):
        unit = step * UNITS + tl.arange(0, UNITS)
        column = unit[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
        rows = load_columns(x + column, column, k, EVEN).to(tl.float32)
        shift = 0.0
        if bits_of(NUMBER) == 8:
            if ZERO != "none":
                shift = load_blocks(zero, block, step, k, zero_row, 1, UNITS, BLOCK_K, SPAN, EVEN)
            value = steps(load_codes(data, row, unit, k, row_bytes, NUMBER, WORDS, FLIP, EVEN), shift, NUMBER, ZERO)
            if SPAN == "column":
                raw = load_blocks(scale, block, step, k, scale_row, scale_step, UNITS, BLOCK_K, SPAN, EVEN)
                value *= scale_value(raw, SCALE)
            part = tl.sum(value * rows[None], 2)
        else:
            if ZERO != "none" and SPAN != "column":
                shift = load_flat(zero, block, step, k, zero_row, 1, UNITS, BLOCK_K, SPAN, EVEN)
            word = load_word(data, row, unit, k, row_bytes, NUMBER, WORDS, EVEN)
            xs = places(rows, UNITS)
            part = tl.zeros((BN, UNITS), dtype=tl.float32)
            for place in tl.static_range(8):
                if ZERO != "none" and SPAN == "column":
                    shift = load_place(zero, block, unit, k, zero_row, 1, BLOCK_K, place)
                value = place_steps(word, shift, k, place, NUMBER, ZERO)
                if SPAN == "column":
                    raw = load_place(scale, block, unit, k, scale_row, scale_step, BLOCK_K, place)
                    value *= scale_value(raw, SCALE)
                part = tl.fma(value, xs[place][None, :], part)
        if SPAN == "tile" or SPAN == "unit":
            raw = load_flat(scale, block, step, k, scale_row, scale_step, UNITS, BLOCK_K, SPAN, EVEN)
            part *= scale_value(raw, SCALE)
        total += part
    result = tl.sum(total, 1)
    if SPAN == "row":
        result *= scale_value(tl.load(scale + block * scale_row), SCALE)
    if x_scale is not None:
        result *= tl.load(x_scale + row_m)
    if x_scale2 is not None:
        result *= tl.load(x_scale2)
    if scale2 is not None:
        result *= tl.load(scale2)
    if bias is not None:
        result += tl.load(bias + row_n, mask=inside_n, other=0.0).to(tl.float32)
    at = (split * m + row_m).to(tl.int64) * n + row_n
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside_n)
