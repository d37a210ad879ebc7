"""Dequantize rows of a weight: all of them (dequantize), or given ones (embedding)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitport.backends.triton.decode import UNIT, load_blocks, load_steps, scale_value
from bitport.backends.triton.fusion import FUSED
from bitport.backends.triton.operand import operand, reach, weight_traits
from bitport.backends.triton.sizes import cdiv
from bitport.ops import Weight

ROWS, UNITS = 8, 32
"""What a program decodes."""


@triton.jit(do_not_specialize=["count"])
def _rows(
    ids: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
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
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
) -> None:
    """Decode rows. An id outside the table gives NaN: that needs no synchronization with the host, and no other memory
    is read."""
    tiles = (count + ROWS - 1) // ROWS
    expert = (tl.program_id(0) // tiles).to(tl.int64)
    at = (tl.program_id(0) % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    piece = tl.program_id(1)
    unit = piece * UNITS + tl.arange(0, UNITS)
    inside = at < count
    asked = tl.load(ids + at, mask=inside, other=0).to(tl.int64) if ids is not None else at
    row = tl.minimum(tl.maximum(asked, 0), n - 1)
    block = row // block_n
    shift = 0.0
    if ZERO != "none":
        shift = load_blocks(zero + expert * scale_expert, block, piece, k, zero_row, 1, UNITS, BLOCK_K, SPAN, EVEN)
    raw = load_blocks(scale + expert * scale_expert, block, piece, k, scale_row, scale_step, UNITS, BLOCK_K, SPAN, EVEN)
    factor = scale_value(raw, SCALE)
    if scale2 is not None:
        factor *= tl.load(scale2 + expert)
    codes = data + expert * data_expert
    value = load_steps(codes, row, unit, k, row_bytes, shift, NUMBER, WORDS, FLIP, EVEN, ZERO, SPAN) * factor
    if ids is not None:
        value = tl.where((asked == row)[:, None, None], value, float("nan"))
    column = unit[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
    target = out + expert * count * k + (at * k)[:, None, None] + column[None]
    tl.store(target, value.to(out.dtype.element_ty), mask=inside[:, None, None] & (column < k)[None])


def _run(ids: Tensor | None, out: Tensor, count: int, experts: int, weight: Weight) -> Tensor:
    traits = weight_traits(weight)
    held = operand(weight, traits)
    grid = (cdiv(count, ROWS) * experts, cdiv(weight.k, UNITS * 8))  # CUDA allows 65535 programs along other axes
    if count:
        _rows[grid](
            *(ids, out, count, weight.n, weight.k, *held.pointers, *held.sizes),
            **held.fixed,
            **reach(traits, UNITS * 8),
            EVEN=weight.k % (UNITS * 8) == 0,
            ROWS=ROWS,
            UNITS=UNITS,
            **FUSED,
        )
    return out


def dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Return the dense weight [.., N, K], computed in float32 and rounded once."""
    out = torch.empty((*weight.batch, weight.n, weight.k), dtype=dtype, device=weight.data.device)
    return _run(None, out, weight.n, out.numel() // max(1, weight.n * weight.k), weight)


def embedding(ids: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
    out = torch.empty((*ids.shape, weight.k), dtype=dtype, device=ids.device)
    return _run(ids.reshape(-1).contiguous(), out, ids.numel(), 1, weight)
