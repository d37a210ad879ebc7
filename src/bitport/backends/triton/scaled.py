"""y = x W^T where matrix units multiply short blocks with their scales: mxfp8, mxfp4, nvfp4 on both sides.

Codes and scales go to the unit as they are stored; nothing is decoded. Rows of the weight are whole numbers of blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitport.backends.triton.configs import Config
from bitport.backends.triton.inputs import quantize_input
from bitport.backends.triton.linear import combined, outputs, splits_of
from bitport.numerics import ACTIVATIONS
from bitport.ops import Weight
from bitport.ops.convert import from_list

UNIT = 32
"""K must be a multiple: of a block, and of what makes whole bytes."""


class Kind(NamedTuple):
    name: str
    """What Triton calls the elements."""
    scale: torch.dtype
    block: int


KINDS = {
    "mxfp8": Kind("e4m3", torch.float8_e8m0fnu, 32),
    "mxfp4": Kind("e2m1", torch.float8_e8m0fnu, 32),
    "nvfp4": Kind("e2m1", torch.float8_e4m3fn, 16),
}
"""Rounding of the input -> what both sides are then."""


def refuses(x: Tensor, weight: Weight, act: str, config: Config) -> str | None:
    if act not in config.scaled:
        return f"its matrix units take no scales of {act}, but those of {', '.join(config.scaled) or 'no format'}"
    kind = KINDS[act]
    wanted = (ACTIVATIONS[act].dtype, kind.scale, (1, kind.block), act == "nvfp4")
    if (weight.dtype, weight.scale.dtype, (weight.block_n, weight.block_k), weight.scale2 is not None) != wanted:
        return (
            f"with {act} inputs the weight must be {act} as well, not {weight.dtype} with {weight.scale.dtype} scales"
        )
    if weight.layout != "plain":
        return f"the weight must be in layout plain, not {weight.layout}"
    if weight.k % UNIT or not weight.n:
        return f"K must be a multiple of {UNIT} and N not 0; they are {weight.k} and {weight.n}"
    return None if x.dtype == torch.bfloat16 else f"x must be bfloat16, not {x.dtype}"


@triton.jit
def scaled(
    x: tl.tensor,
    x_scale: tl.tensor,
    x_scale2: tl.tensor,
    data: tl.tensor,
    scale: tl.tensor,
    scale2: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    per_split: tl.tensor,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
) -> None:
    """What lies past the k-th column is 0 times a scale of 0 or 2^-127."""
    tiles_m = (m + BM - 1) // BM
    tile_m, tile_n, split = tl.program_id(0) % tiles_m, tl.program_id(0) // tiles_m, tl.program_id(1)
    PACKED: tl.constexpr = 2 if KIND == "e2m1" else 1
    BYTES: tl.constexpr = BK // PACKED
    row_m, row_n = tile_m * BM + tl.arange(0, BM), tile_n * BN + tl.arange(0, BN)
    at_m, at_n = tl.minimum(row_m, m - 1).to(tl.int64)[:, None], tl.minimum(row_n, n - 1).to(tl.int64)[:, None]
    row_bytes, blocks = k // PACKED, k // BLOCK
    total = tl.zeros((BM, BN), dtype=tl.float32)
    last = tl.minimum((k + BK - 1) // BK, (split + 1) * per_split)
    for step in range(split * per_split, last):
        byte = (step * BYTES + tl.arange(0, BYTES))[None, :]
        block = (step * (BK // BLOCK) + tl.arange(0, BK // BLOCK))[None, :]
        if EVEN:
            a, b = tl.load(x + at_m * row_bytes + byte), tl.load(data + at_n * row_bytes + byte)
            a_scale, b_scale = tl.load(x_scale + at_m * blocks + block), tl.load(scale + at_n * blocks + block)
        else:
            a = tl.load(x + at_m * row_bytes + byte, mask=byte < row_bytes, other=0)
            b = tl.load(data + at_n * row_bytes + byte, mask=byte < row_bytes, other=0)
            a_scale = tl.load(x_scale + at_m * blocks + block, mask=block < blocks, other=0)
            b_scale = tl.load(scale + at_n * blocks + block, mask=block < blocks, other=0)
        if BLOCK == 16:
            a_scale, b_scale = a_scale.to(tl.float8e4nv, bitcast=True), b_scale.to(tl.float8e4nv, bitcast=True)
        total = tl.dot_scaled(a, a_scale, KIND, tl.trans(b), b_scale, KIND, total)
    if x_scale2 is not None:
        total *= tl.load(x_scale2) * tl.load(scale2)
    inside_n = row_n < n
    if bias is not None:
        total += tl.load(bias + row_n, mask=inside_n, other=0.0).to(tl.float32)[None, :]
    at = (split * m + row_m).to(tl.int64)[:, None] * n + row_n[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(row_m < m)[:, None] & inside_n[None, :])


def product(
    x: Tensor, act: str, act_scale: Tensor | None, weight: Weight, bias: Tensor | None, config: Config
) -> Tensor:
    """[M, N] for x [.., K], which is rounded first."""
    kind, held = KINDS[act], from_list(quantize_input(x, act, act_scale))
    m = held.data.shape[0]
    blocks = config.scaled_tiles(m)
    bm, bn, bk = blocks["BM"], blocks["BN"], blocks["BK"]
    tiles = triton.cdiv(m, bm) * triton.cdiv(weight.n, bn)
    splits, per_split = splits_of(tiles, triton.cdiv(weight.k, bk), m, weight, blocks)
    out, target = outputs(splits, m, weight.n, x.dtype, x.device)
    parts = (held.data, held.scale, weight.data.contiguous(), weight.scale.contiguous())
    codes, x_scale, data, scale = (part.view(torch.uint8) for part in parts)
    scaled[(tiles, splits)](
        *(codes, x_scale, held.scale2, data, scale, weight.scale2, bias if splits == 1 else None, target),
        *(m, weight.n, weight.k, per_split),
        KIND=kind.name,
        BLOCK=kind.block,
        EVEN=weight.k % bk == 0,
        BM=bm,
        BN=bn,
        BK=bk,
        num_warps=blocks["num_warps"],
        num_stages=blocks["num_stages"],
    )
    return combined(target, bias, out, splits)
