"""Attention over quantized keys and values, which reads each code once, directly from the store.

A tile holds the query rows of all heads that share a key head. A program takes one such tile and a range of tokens, and
stores partial results for each row::

    peak   the largest score in the range
    total  sum of exp(score - peak)
    sum    sum of exp(score - peak) * value

Quantized and dense tokens are separate stretches for the same kernel. ``join`` combines all partial results, each
weighted by exp(its peak - the largest). Scores, weights and values are float32. For 16-bit inputs matrix units multiply
them as sums of two bfloat16 (bf16x3), which keeps 16 bits of each, five more than float16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitport.backends.aten import beginning
from bitport.backends.triton.configs import Config
from bitport.backends.triton.decode import UNIT, load_blocks, load_columns, load_steps, scale_value
from bitport.backends.triton.fusion import FUSED
from bitport.backends.triton.operand import SCALES, reach
from bitport.backends.triton.operand import refuses as refuses_weight
from bitport.backends.triton.sizes import cdiv, next_power
from bitport.numerics import NUMBER_TYPES
from bitport.ops import Weight
from bitport.ops.attention import AttentionArgs, mask_steps, rows_together

WIDEST = 256
KEPT, HELD, WARPS = 8192, 4096, 4
"""KEPT: numbers of the queries per program; HELD: numbers of keys or values that it holds at a time (more if SUMMED
tokens need it). With two pipeline stages these fit the on-chip memory of every GPU. Where matrix units are not used
they are halved, with twice the threads: each thread then has its operands in registers, and when there are far too many
of them NVIDIA's compiler keeps none there."""
STAGES = 2
LEAST = 16
"""Rows, tokens and columns of the smallest product of a matrix unit."""
SUMMED = 32
"""Least reduction length, in tokens or columns, of such a product. On NVIDIA the four threads that share a sum each
take as many consecutive numbers as there are codes in 32 bits; Triton 3.6 and 3.7 assume 4-bit codes where numbers come
from bytes and tl.join. With fewer than 4 * 8 numbers two threads then hold the same ones: these count twice, others
never, and the columns are mixed up."""


class Tokens(NamedTuple):
    """Keys or values [sequences, heads, tokens, k], quantized or dense. ``*_sequence`` and ``*_head`` are strides;
    ``row`` is the size of a token in bytes (dense: in numbers); ``tall`` tokens share a row of ``blocks`` scales."""

    data: Tensor
    data_sequence: int
    data_head: int
    scale: Tensor | None
    scale_sequence: int
    scale_head: int
    zero: Tensor | None
    zero_sequence: int
    zero_head: int
    k: int
    row: int
    tall: int
    blocks: int


class Fixed(NamedTuple):
    """Compile-time properties of Tokens: ``number`` is "" if they are dense, ``width`` a power of two."""

    number: tl.constexpr
    words: tl.constexpr
    scale: tl.constexpr
    zero: tl.constexpr
    span: tl.constexpr
    block_k: tl.constexpr
    width: tl.constexpr


class Stretch(NamedTuple):
    """A range of ``tokens`` tokens. Token t is at position t of the sequence, from the ``first`` on at t + ``gap``."""

    keys: tuple[Tokens, Fixed]
    values: tuple[Tokens, Fixed]
    tokens: int
    first: int
    gap: int


@triton.jit
def load_tokens(
    token: tl.tensor,
    sequence: tl.tensor,
    head: tl.tensor,
    data: tl.tensor,
    data_sequence: tl.tensor,
    data_head: tl.tensor,
    scale: tl.tensor,
    scale_sequence: tl.tensor,
    scale_head: tl.tensor,
    zero: tl.tensor,
    zero_sequence: tl.tensor,
    zero_head: tl.tensor,
    k: tl.tensor,
    row: tl.tensor,
    tall: tl.tensor,
    blocks: tl.tensor,
    NUMBER: tl.constexpr,
    WORDS: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Load tokens of one head as float32 [tokens, WIDTH], 0 past the k-th column."""
    data += sequence * data_sequence + head * data_head
    column = tl.arange(0, WIDTH)[None, :]
    if NUMBER == "":
        value = load_columns(data + (token * row)[:, None] + column, column, k, False).to(tl.float32)
    else:
        unit, block = tl.arange(0, WIDTH // UNIT), token // tall
        scale += sequence * scale_sequence + head * scale_head
        shift = 0.0
        if ZERO != "none":
            zero += sequence * zero_sequence + head * zero_head
            shift = load_blocks(zero, block, 0, k, blocks, 1, WIDTH // UNIT, BLOCK_K, SPAN, False)
        raw = load_blocks(scale, block, 0, k, blocks, 1, WIDTH // UNIT, BLOCK_K, SPAN, False)
        factor = scale_value(raw, SCALE)
        steps = load_steps(data, token, unit, k, row, shift, NUMBER, WORDS, 0, False, ZERO, SPAN)
        value = tl.where(column < k, tl.reshape(steps * factor, (token.shape[0], WIDTH)), 0.0)
    return value


@triton.jit(do_not_specialize=("first", "gap", "count", "per_split", "newest"))
def attend(
    q: tl.tensor,
    mask: tl.tensor,
    mask_steps: tl.tuple,
    peaks: tl.tensor,
    totals: tl.tensor,
    sums: tl.tensor,
    keys: tl.tuple,
    values: tl.tuple,
    heads: tl.tensor,
    sharing: tl.tensor,
    rows: tl.tensor,
    first: tl.tensor,
    gap: tl.tensor,
    count: tl.tensor,
    per_split: tl.tensor,
    newest: tl.tensor,
    scale: tl.tensor,
    KEYS: tl.tuple,
    VALUES: tl.tuple,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BT: tl.constexpr,
) -> None:
    """Process one split of the ``count`` tokens of a stretch; those that a mask of bool hides from all rows are not
    read. ``newest``: position of the newest token that row 0 sees; ``sharing``: query heads per key head."""
    tiles = (sharing * rows + BM - 1) // BM
    pair, split = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(1)
    sequence, head = pair // heads, pair % heads
    at = tl.program_id(0) % tiles * BM + tl.arange(0, BM)
    inside = at < sharing * rows
    row, query_head = at % rows, head * sharing + at // rows
    place = pair * sharing * rows + at
    column = tl.arange(0, KEYS.width)[None, :]
    held = inside[:, None] & (column < keys.k)
    query = tl.load(q + place[:, None] * keys.k + column, mask=held, other=0.0).to(tl.float32)
    peak = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    seen = tl.zeros((BM, VALUES.width), tl.float32)
    stop = tl.minimum(count, (split + 1) * per_split)
    for start in range(split * per_split, stop, BT):
        token = start + tl.arange(0, BT)
        position = tl.where(token < first, token, token + gap)
        here = tl.minimum(token, count - 1).to(tl.int64)
        looks = inside[:, None] & (token < stop)[None, :]
        if CAUSAL:
            looks &= position[None, :] <= (newest + row)[:, None]
        shown, added = True, 0.0
        if mask is not None:
            of_row = sequence * mask_steps[0] + query_head * mask_steps[1] + row.to(tl.int64) * mask_steps[2]
            of_token = position.to(tl.int64) * mask_steps[3]
            asked = tl.load(mask + of_row[:, None] + of_token[None, :], mask=looks, other=0)
            if mask.dtype.element_ty == tl.int8:
                looks &= asked != 0
                shown = tl.max(tl.max(looks.to(tl.int32), 1), 0) != 0
            else:
                added = asked.to(tl.float32)
        if shown:
            key = load_tokens(here, sequence, head, *keys, *KEYS)
            score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale + added
            score = tl.where(looks, score, float("-inf"))
            higher = tl.maximum(peak, tl.max(score, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weight = tl.exp(score - base[:, None])
            fading = tl.exp(peak - base)
            value = load_tokens(here, sequence, head, *values, *VALUES)
            seen = tl.dot(weight, value, seen * fading[:, None], input_precision=PRECISION)
            total = total * fading + tl.sum(weight, 1)
            peak = higher
    left = split * (tl.num_programs(0) // tiles) * sharing * rows + place
    tl.store(peaks + left, peak, mask=inside)
    tl.store(totals + left, total, mask=inside)
    column = tl.arange(0, VALUES.width)[None, :]
    tl.store(sums + left[:, None] * values.k + column, seen, mask=inside[:, None] & (column < values.k))


@triton.jit
def join(
    peaks: tl.tensor,
    totals: tl.tensor,
    sums: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    k: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    """Combine the parts of one row of the result, in order; zeros if no token was seen."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    peak, total = float("-inf"), 0.0
    seen = tl.zeros((WIDTH,), tl.float32)
    for part in range(parts):
        at = part * tl.num_programs(0) + row
        further = tl.load(peaks + at)
        higher = tl.maximum(peak, further)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fading, weight = tl.exp(peak - base), tl.exp(further - base)
        seen = seen * fading + tl.load(sums + at * k + column, mask=column < k, other=0.0) * weight
        total = total * fading + tl.load(totals + at) * weight
        peak = higher
    seen /= tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * k + column, seen.to(out.dtype.element_ty), mask=column < k)


def refuses(call: AttentionArgs) -> str | None:
    for name, weight in (("keys", call.keys), ("values", call.values)):
        if weight.layout != "plain":
            return f"{name} must be in layout plain, not {weight.layout}"
        if weight.scale2 is not None:
            return f"{name} with a second scale are not taken"
        if weight.k > WIDEST:
            return f"{name} may be {WIDEST} wide, not {weight.k}"
        if weight.n and (reason := refuses_weight(weight)):
            return f"{name}: {reason}"
    return None if call.q.numel() and call.values.k else "there is nothing to compute"


def attention(call: AttentionArgs, config: Config) -> Tensor:
    q, mask = call.q.contiguous(), call.mask
    sequences, query_heads, rows, _ = q.shape
    heads = call.keys.data.shape[1]
    sharing, widest = query_heads // heads, max(width(call.keys.k), width(call.values.k))
    by_units = config.bfloat16 and q.dtype != torch.float32
    kept, held, warps = (KEPT, HELD, WARPS) if by_units else (KEPT // 2, HELD // 2, WARPS * 2)
    tile = min(kept // widest, max(LEAST, next_power(sharing * rows)))
    tiles, step = cdiv(sharing * rows, tile), max(SUMMED if by_units else LEAST, held // widest)
    wanted = config.gemv["programs"] // (sequences * heads * tiles)
    steps = mask_steps(mask)
    if mask is not None and mask.dtype == torch.bool:
        mask = mask.view(torch.int8)
    parts = [(each, *_splits(cdiv(each.tokens, step), wanted)) for each in stretches(call)]
    count, places = sum(splits for _, splits, _ in parts), sequences * query_heads * rows
    peaks, totals = (torch.empty(count, places, dtype=torch.float32, device=q.device) for _ in range(2))
    sums = torch.empty(count, places, call.values.k, dtype=torch.float32, device=q.device)
    begin = 0
    for part, splits, per_split in parts:
        (keys, of_keys), (values, of_values) = part.keys, part.values
        sizes = heads, sharing, rows, part.first, part.gap, part.tokens, per_split * step
        attend[(sequences * heads * tiles, splits)](
            *(q, mask, steps, peaks[begin:], totals[begin:], sums[begin:], keys, values),
            *(*sizes, call.tokens - rows, call.scale),
            KEYS=of_keys,
            VALUES=of_values,
            CAUSAL=call.causal,
            PRECISION="ieee" if q.dtype == torch.float32 else "bf16x3",
            BM=tile,
            BT=step,
            num_warps=warps,
            num_stages=STAGES,
            **FUSED,
        )
        begin += splits
    out = q.new_empty(*q.shape[:3], call.values.k)
    join[(places,)](peaks, totals, sums, out, count, call.values.k, WIDTH=width(call.values.k), **FUSED)
    return out


def stretches(call: AttentionArgs) -> list[Stretch]:
    """Return the stretches of a call that are not empty."""
    quantized, found = call.keys.n, []
    if quantized:
        found.append(Stretch(of_codes(call.keys), of_codes(call.values), quantized, 0, call.first))
    if call.dense_keys is not None and call.dense_values is not None and call.tokens > quantized:
        sides = of_floats(call.dense_keys), of_floats(call.dense_values)
        found.append(Stretch(*sides, call.tokens - quantized, call.first, quantized))
    return found


def _splits(steps: int, wanted: int) -> tuple[int, int]:
    """Return (splits, steps in each), with no empty split."""
    each = cdiv(steps, max(1, min(steps, wanted)))
    return cdiv(steps, each), each


def width(k: int) -> int:
    return max(SUMMED, next_power(k))


def of_codes(weight: Weight) -> tuple[Tokens, Fixed]:
    number, wide = NUMBER_TYPES[weight.dtype], width(weight.k)
    data, scale = rows_together(weight.data), rows_together(weight.scale)
    zero = None if weight.zero is None else rows_together(weight.zero)
    words = number.bits in (1, 2, 4) and weight.k % 8 == 0
    words &= all(at % number.bits == 0 for at in (beginning(data), *data.stride()[:2]))
    kind = "none" if zero is None else "float" if zero.is_floating_point() else "int"
    where = reach(weight, wide)
    tokens = Tokens(
        data=data.view(torch.uint8),
        data_sequence=data.stride(0),
        data_head=data.stride(1),
        scale=scale.view(torch.uint8) if scale.dtype in SCALES else scale,
        scale_sequence=scale.stride(0),
        scale_head=scale.stride(1),
        zero=zero,
        zero_sequence=0 if zero is None else zero.stride(0),
        zero_head=0 if zero is None else zero.stride(1),
        k=weight.k,
        row=data.shape[3],
        tall=weight.block_n,
        blocks=scale.shape[3],
    )
    fixed = _fixed(weight.dtype, words, SCALES.get(scale.dtype, "float"), kind, where["SPAN"], where["BLOCK_K"], wide)
    return tokens, fixed


def of_floats(dense: Tensor) -> tuple[Tokens, Fixed]:
    dense = rows_together(dense)
    k = dense.shape[3]
    tokens = Tokens(dense, dense.stride(0), dense.stride(1), None, 0, 0, None, 0, 0, k, k, 1, 1)
    return tokens, _fixed("", False, "", "", "", 0, width(k))


def _fixed(*known: str | int) -> Fixed:
    return Fixed(*map(tl.constexpr, known))
