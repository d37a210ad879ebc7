"""Quantize inputs: int8 per token or tensor, float8 per token, tensor or 1x128 block, and the short-block formats
(mxfp8, mxfp4, nvfp4). Scales per row or per block take one pass; one scale per tensor needs another pass before.

The result is either codes (CODES, see inputs.py) or, for a product that follows, small numbers that int8 or bfloat16
holds exactly, with the scale separate. The scale of a short block is a power of two, or has four bits in nvfp4, so the
numbers can be multiplied by it exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitport.backends.aten import count
from bitport.backends.triton.decode import bits_of, midpoint_of, scale_value
from bitport.backends.triton.encode import (
    INFINITE,
    divided,
    float_code,
    global_scale,
    linear_scale,
    power_of_two,
    range_scale,
    small_scale,
    tiny,
    to_float,
    whole,
    zero_point,
)
from bitport.backends.triton.fusion import EXACT
from bitport.backends.triton.sizes import cdiv, next_power
from bitport.numerics import ACTIVATIONS, STATIC, Format
from bitport.numerics.qparams import global_scale_range, scale_range

SEPARATE = tuple(name for name, fmt in ACTIVATIONS.items() if fmt.block[1] and fmt.scale == "float32")
"""Formats with several scales per row that cannot be folded into the numbers."""
ROW, CHUNK = 4096, 1024
"""Columns that a program holds at a time: by row, and by short blocks."""
PER_THREAD = 16
"""Columns of a row per thread: two 16-byte loads of bfloat16."""


class Rounded(NamedTuple):
    """x = rows * scale * scale2; ``place`` is what one entry of the scale covers: row, tile (128 columns) or ""."""

    rows: Tensor
    scale: Tensor | None = None
    scale2: Tensor | None = None
    place: str = ""


class Destination(NamedTuple):
    """Tensors to write. ``single``, the one scale for all, is read instead if it was given."""

    rows: Tensor
    scale: Tensor | None
    zero: Tensor | None
    single: Tensor | None
    codes: bool


@triton.jit
def largest(
    x: tl.tensor, out: tl.tensor, k: tl.tensor, x_row: tl.tensor, BLOCK: tl.constexpr, CHUNK: tl.constexpr
) -> None:
    """Compute the largest magnitude of x into ``out``, initially 0, as bits: their integer order is that of magnitudes,
    with NaN largest. With blocks (BLOCK > 1) only those that are finite throughout count."""
    x += tl.program_id(0).to(tl.int64) * x_row
    most = tl.zeros((CHUNK // BLOCK,), tl.int32)
    for first in range(0, k, CHUNK):
        column = first + tl.arange(0, CHUNK)
        value = tl.load(x + column, mask=column < k, other=0.0).to(tl.float32)
        bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        if BLOCK > 1:
            bits = tl.max(tl.reshape(bits, (CHUNK // BLOCK, BLOCK)), 1)
            bits = tl.where(bits < INFINITE, bits, 0)
        most = tl.maximum(most, bits)
    tl.atomic_max(out, tl.max(most, 0))


@triton.jit
def by_row(
    x: tl.tensor,
    amax: tl.tensor,
    single: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    k: tl.tensor,
    x_row: tl.tensor,
    highest: tl.tensor,
    widest: tl.tensor,
    NUMBER: tl.constexpr,
    ZERO: tl.constexpr,
    CODES: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Quantize a row. ``single``: one scale for all instead of the row's own, computed from ``amax`` if that is given.
    ``highest``: the largest scale; ``widest``: where a range with a zero point is clipped."""
    row = tl.program_id(0).to(tl.int64)
    x += row * x_row
    out += row * k
    zero = 0.0
    if amax is not None:
        all_of_x = tl.load(amax).to(tl.float32, bitcast=True)
        scale = linear_scale(all_of_x, (all_of_x != all_of_x).to(tl.int32), tiny(), highest, NUMBER)
        if row == 0:
            tl.store(single, scale)
    elif single is not None:
        scale = tl.load(single)
    else:
        low, high = tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32)
        nan = tl.zeros((CHUNK,), tl.int32)
        for first in range(0, k, CHUNK):
            column = first + tl.arange(0, CHUNK)
            value = tl.load(x + column, mask=column < k, other=0.0).to(tl.float32)
            low, high = tl.minimum(low, value), tl.maximum(high, value)
            nan |= (value != value).to(tl.int32)
        least, most, bad = tl.min(low, 0), tl.max(high, 0), tl.max(nan, 0)
        if ZERO:
            amax_of_row = tl.maximum(most, -least)
            least, most = tl.maximum(least, -widest), tl.minimum(most, widest)
            bad |= (amax_of_row == float("inf")).to(tl.int32)
            scale = range_scale(least, most, bad, tiny(), highest, 255)
            zero = whole(zero_point(least, most, bad, scale, 255))
            if zeros is not None:
                tl.store(zeros + row, zero.to(tl.uint8))
        else:
            scale = linear_scale(tl.maximum(most, -least), bad, tiny(), highest, NUMBER)
        tl.store(scales + row, scale)
    for first in range(0, k, CHUNK):
        column = first + tl.arange(0, CHUNK)
        steps = divided(tl.load(x + column, mask=column < k, other=0.0).to(tl.float32), scale)
        if NUMBER == "int8":
            MIDDLE: tl.constexpr = midpoint_of(NUMBER)
            kept = tl.where(steps == steps, tl.minimum(tl.maximum(steps, -512.0), 512.0), 0.0)
            offset = zero if ZERO else MIDDLE
            value = tl.minimum(tl.maximum(whole(kept), -offset), 255.0 - offset)
            if CODES:
                value += offset
        else:
            value = to_float(steps, NUMBER)
            if CODES:
                value = float_code(value, steps, NUMBER)
        tl.store(out + column, value.to(out.dtype.element_ty), mask=column < k)


@triton.jit
def by_block(
    x: tl.tensor,
    amax: tl.tensor,
    single: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    k: tl.tensor,
    x_row: tl.tensor,
    lowest: tl.tensor,
    highest: tl.tensor,
    NUMBER: tl.constexpr,
    SCALE: tl.constexpr,
    RULE: tl.constexpr,
    CODES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Quantize BLOCKS blocks of a row. For a product, scales of SCALE float stay separate and all others are folded in.
    ``single``: the global scale, computed from ``amax`` if that is given. ``lowest``, ``highest``: the range of the
    global scale, or of a float one."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    value = tl.load(x + row * x_row + column, mask=column < k, other=0.0).to(tl.float32)
    most, bad = tl.max(tl.abs(value), 1), tl.max((value != value).to(tl.int32), 1)
    if SCALE == "e8m0":
        code = power_of_two(most, bad, NUMBER, RULE)
        scale = scale_value(code, "e8m0")
        factor = scale
    elif SCALE == "e4m3":
        if amax is not None:
            second = global_scale(tl.load(amax).to(tl.float32, bitcast=True), lowest, highest, NUMBER)
            if row + tl.program_id(1) == 0:
                tl.store(single, second)
        else:
            second = tl.load(single)
        scale = small_scale(most, bad, second, NUMBER)
        code = float_code(scale, scale, "float8_e4m3")
        factor = scale * second
    else:
        scale = linear_scale(most, bad, tiny(), highest, NUMBER)
        factor = scale
    steps = divided(value, factor[:, None])
    value = to_float(steps, NUMBER)
    at = row * ((k + BLOCK - 1) // BLOCK) + block
    if SCALE == "float":
        tl.store(scales + at, scale, mask=block * BLOCK < k)
    elif CODES:
        tl.store(scales + at, code.to(tl.uint8), mask=block * BLOCK < k)
    else:
        value *= scale[:, None]
    if CODES:
        codes = float_code(value, steps, NUMBER)
        if bits_of(NUMBER) == 4:
            even, odd = tl.split(tl.reshape(codes, (BLOCKS, BLOCK // 2, 2)))
            byte = block[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
            row_bytes = (k + 1) // 2
            tl.store(out + row * row_bytes + byte, (even | (odd << 4)).to(tl.uint8), mask=byte < row_bytes)
        else:
            tl.store(out + row * k + column, codes.to(tl.uint8), mask=column < k)
    else:
        tl.store(out + row * k + column, value.to(out.dtype.element_ty), mask=column < k)


def launch(x: Tensor, fmt: Format, to: Destination, given: Tensor | None) -> None:
    """Quantize x [M, K], its last dimension contiguous, into ``to``."""
    m, k = x.shape
    block, number = fmt.block[1], fmt.number
    amax = None
    if to.single is not None and given is None:
        amax = torch.zeros(1, dtype=torch.int32, device=x.device)
        chunk, warps = _row(k)
        largest[(m,)](x, amax, k, x.stride(0), BLOCK=max(block, 1), CHUNK=chunk, num_warps=warps, **EXACT)
    if not (block and fmt.block[0]):
        chunk, warps = _row(k)
        widest = torch.finfo(x.dtype).max * (255 / 257)
        _, highest = scale_range(torch.float32, x.dtype, number.max if fmt.zero == "none" else 1.0)
        by_row[(m,)](
            *(x, amax, to.single, to.rows, to.scale, to.zero, k, x.stride(0), highest, widest),
            NUMBER=fmt.dtype,
            ZERO=fmt.zero == "int",
            CODES=to.codes,
            CHUNK=chunk,
            num_warps=warps,
            **EXACT,
        )
        return
    count = cdiv(k, block)
    blocks = min(CHUNK // block, next_power(count))
    by_block[(m, cdiv(count, blocks))](
        *(x, amax, to.single, to.rows, to.scale, k, x.stride(0)),
        *(global_scale_range(number) if fmt.global_scale else scale_range(torch.float32, x.dtype, number.max)),
        NUMBER=fmt.dtype,
        SCALE="float" if fmt.scale == "float32" else fmt.scale,
        RULE=fmt.scale_rule,
        CODES=to.codes,
        BLOCK=block,
        BLOCKS=blocks,
        **EXACT,
    )


def rounded(x: Tensor, act: str, act_scale: Tensor | None, float8: bool = False) -> Rounded:
    """Quantize x [M, K], its last dimension contiguous, to an activation format for a product. ``float8``: the product
    takes float8 operands."""
    fmt = ACTIVATIONS[act]
    m, k = x.shape
    dtype = torch.bfloat16
    if fmt.dtype == "int8" and fmt.zero == "none":
        dtype = torch.int8
    elif float8 and fmt.dtype == "float8_e4m3" and fmt.scale == "float32":
        dtype = torch.float8_e4m3fn
    rows = torch.empty(m, k, dtype=dtype, device=x.device)
    single = single_scale(act, act_scale, x.device)
    scale, place = None, ""
    if fmt.scale == "float32" and fmt.block != (0, 0):
        scale = torch.empty(m, cdiv(k, fmt.block[1] or k), dtype=torch.float32, device=x.device)
        place = "tile" if fmt.block[1] else "row"
    launch(x, fmt, Destination(rows, scale, None, single, codes=False), act_scale)
    return Rounded(rows, scale, single, place)


def single_scale(act: str, given: Tensor | None, device: torch.device) -> Tensor | None:
    """Return the scale for all of x if the format has one: the given one, or an uninitialized tensor for it."""
    if act not in STATIC:
        return None
    return torch.empty(1, 1, dtype=torch.float32, device=device) if given is None else given


def plain_rows(x: Tensor) -> Tensor:
    """Return x [.., K] as [M, K] with contiguous rows."""
    rows = x.reshape(count(x), x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _row(k: int) -> tuple[int, int]:
    """Return (columns at a time, warps)."""
    chunk = min(ROW, max(32, next_power(k)))
    return chunk, max(1, min(8, chunk // (32 * PER_THREAD)))
