"""y = x W^T where matrix units apply block scales themselves: mxfp8, mxfp4, nvfp4, for one matrix or experts.

Codes and scales are passed to the unit as stored; nothing is decoded. Rows of the weight are whole numbers of blocks.
Both sides have the same kind of scales, but may differ in elements, as with float4 weights and float8 inputs. Experts
are found as in ``product``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitport.backends.triton.configs import Config
from bitport.backends.triton.fusion import FUSED
from bitport.backends.triton.inputs import quantize_input
from bitport.backends.triton.linear import combined, grid_of, outputs
from bitport.backends.triton.operand import weight_traits, whole
from bitport.backends.triton.product import find_expert
from bitport.backends.triton.sizes import cdiv, next_power
from bitport.numerics import ACTIVATIONS, NUMBER_TYPES
from bitport.ops import Weight
from bitport.ops.convert import from_list

UNIT = 32
"""K must be a multiple of it: whole blocks, and whole bytes."""


class Blocks(NamedTuple):
    scale: torch.dtype
    columns: int
    second: bool
    """Whether there is a global scale too."""
    elements: tuple[str, ...]


MX = Blocks(torch.float8_e8m0fnu, 32, False, ("float8_e4m3", "float8_e5m2", "float4_e2m1"))
BLOCKS = {"mxfp8": MX, "mxfp4": MX, "nvfp4": Blocks(torch.float8_e4m3fn, 16, True, ("float4_e2m1",))}
"""Activation format -> the blocks of both sides, and the number types that the weight may have."""
ELEMENTS = {"float8_e4m3": "e4m3", "float8_e5m2": "e5m2", "float4_e2m1": "e2m1"}
"""Number type -> Triton's name for it."""


def refuses(x: Tensor, weight: Weight, act: str, config: Config) -> str | None:
    if act not in config.scaled:
        return f"its matrix units take no scales of {act}, but those of {', '.join(config.scaled) or 'no format'}"
    scale, columns, second, elements = BLOCKS[act]
    mine = weight.scale.dtype, (weight.block_n, weight.block_k), weight.scale2 is not None
    if weight.dtype not in elements or mine != (scale, (1, columns), second):
        return (
            f"with {act} inputs the weight must be {' or '.join(elements)} with {scale} scales per 1x{columns} block, "
            f"not {weight.dtype} with {weight.scale.dtype} scales per {weight.block_n}x{weight.block_k}"
        )
    if not config.mixed and NUMBER_TYPES[weight.dtype].bits != ACTIVATIONS[act].number.bits:
        return f"its matrix units take the same number of bits on both sides, not {weight.dtype} with {act} inputs"
    if weight.layout != "plain":
        return f"the weight must be in layout plain, not {weight.layout}"
    if weight.k % UNIT or not weight.n:
        return f"K must be a multiple of {UNIT} and N not 0; they are {weight.k} and {weight.n}"
    return None if x.dtype == torch.bfloat16 else f"x must be bfloat16, not {x.dtype}"


@triton.jit
def load_part(at: tl.tensor, inside: tl.tensor, EVEN: tl.constexpr) -> tl.tensor:
    return tl.load(at) if EVEN else tl.load(at, mask=inside, other=0)


@triton.jit(do_not_specialize=["m", "experts", "per_split"])
def scaled(
    x: tl.tensor,
    x_scale: tl.tensor,
    x_scale2: tl.tensor,
    data: tl.tensor,
    scale: tl.tensor,
    scale2: tl.tensor,
    bias: tl.tensor,
    ends: tl.tensor,
    out: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    experts: tl.tensor,
    per_split: tl.tensor,
    X: tl.constexpr,
    WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
) -> None:
    """Compute a BM x BN tile of y. Columns past the k-th are 0, with a scale of 0 or 2^-127."""
    tiles_m = tl.num_programs(0) // ((n + BN - 1) // BN)
    tile_m, tile_n, split = tl.program_id(0) % tiles_m, tl.program_id(0) // tiles_m, tl.program_id(1)
    X_PACKED: tl.constexpr = 2 if X == "e2m1" else 1
    PACKED: tl.constexpr = 2 if WEIGHT == "e2m1" else 1
    x_bytes, row_bytes, blocks = k // X_PACKED, k // PACKED, k // BLOCK
    if ends is None:
        start, stop = tile_m * BM, m
    else:
        expert, start, stop = find_expert(ends, tile_m, m, experts, BM, EXPERTS)
        if start >= stop:
            return
        data += expert.to(tl.int64) * n * row_bytes
        scale += expert.to(tl.int64) * n * blocks
        if scale2 is not None:
            scale2 += expert
    row_m, row_n = start + tl.arange(0, BM), tile_n * BN + tl.arange(0, BN)
    at_m, at_n = tl.minimum(row_m, stop - 1).to(tl.int64)[:, None], tl.minimum(row_n, n - 1).to(tl.int64)[:, None]
    total = tl.zeros((BM, BN), dtype=tl.float32)
    last = tl.minimum((k + BK - 1) // BK, (split + 1) * per_split)
    for step in range(split * per_split, last):
        x_byte = (step * (BK // X_PACKED) + tl.arange(0, BK // X_PACKED))[None, :]
        byte = (step * (BK // PACKED) + tl.arange(0, BK // PACKED))[None, :]
        block = (step * (BK // BLOCK) + tl.arange(0, BK // BLOCK))[None, :]
        a = load_part(x + at_m * x_bytes + x_byte, x_byte < x_bytes, EVEN)
        b = load_part(data + at_n * row_bytes + byte, byte < row_bytes, EVEN)
        a_scale = load_part(x_scale + at_m * blocks + block, block < blocks, EVEN)
        b_scale = load_part(scale + at_n * blocks + block, block < blocks, EVEN)
        if BLOCK == 16:
            a_scale, b_scale = a_scale.to(tl.float8e4nv, bitcast=True), b_scale.to(tl.float8e4nv, bitcast=True)
        total = tl.dot_scaled(a, a_scale, X, tl.trans(b), b_scale, WEIGHT, total)
    if x_scale2 is not None:
        total *= tl.load(x_scale2) * tl.load(scale2)
    inside_n = row_n < n
    if bias is not None:
        total += tl.load(bias + row_n, mask=inside_n, other=0.0).to(tl.float32)[None, :]
    at = (split * m + row_m).to(tl.int64)[:, None] * n + row_n[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(row_m < stop)[:, None] & inside_n[None, :])


def product(
    x: Tensor,
    act: str,
    act_scale: Tensor | None,
    weight: Weight,
    bias: Tensor | None,
    config: Config,
    ends: Tensor | None = None,
) -> Tensor:
    """Quantize x [.., K] and return the product [M, N]; with ``ends`` rows grouped by expert, and zeros for rows
    without one."""
    held = from_list(quantize_input(x, act, act_scale))
    m, experts = held.data.shape[0], None if ends is None else ends.shape[0]
    blocks = config.scaled_tiles(cdiv(m, experts or 1))
    bk = blocks["BK"]
    (count, splits), per_split = grid_of(m, weight_traits(weight), bk, blocks, experts)
    out, target = outputs(splits, m, weight.n, x.dtype, x.device, zeros=ends is not None)
    parts = (held.data, held.scale, weight.data.contiguous(), weight.scale.contiguous())
    codes, x_scale, data, scale = (part.view(torch.uint8) for part in parts)
    scaled[(count, splits)](
        *(codes, x_scale, held.scale2, data, scale, whole(weight.scale2), bias if splits == 1 else None, ends, target),
        *(m, weight.n, weight.k, experts or 1, per_split),
        X=ELEMENTS[ACTIVATIONS[act].dtype],
        WEIGHT=ELEMENTS[weight.dtype],
        BLOCK=BLOCKS[act].columns,
        EVEN=weight.k % bk == 0,
        EXPERTS=next_power(experts or 1),
        BM=blocks["BM"],
        BN=blocks["BN"],
        BK=bk,
        num_warps=blocks["num_warps"],
        num_stages=blocks["num_stages"],
        **FUSED,
    )
    return combined(target, bias, out, splits)
