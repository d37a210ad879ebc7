"""dyn_linear by ``aten::_scaled_mm_v2`` with a scale per 1x128 of the input and per 128x128 of the weight::

    x [M, K]       scale [M, K/128]       strides (1, M)             M padded to a multiple of 4
    weight [N, K]  scale [K'/128, N/128]  strides (1, K'/128)        K/128 padded to a multiple of 4

Both are padded because cuBLAS requires each column of scales to be aligned to 16 bytes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from bitport.backends.aten import aligned, empty, finish, rounded

BLOCK = 128
UNIT = 4


def refuses(*args: Any) -> str | None:
    x, _, _, _, scale2, dtype, n, k, block_n, block_k, layout, act, _, _ = args
    if dtype != "float8_e4m3" or scale2 is not None:
        return f"the weight must be float8_e4m3, not {dtype}"
    if act != "fp8-128":
        return f"the input must be rounded as fp8-128, not {act}"
    if (block_n, block_k) != (BLOCK, BLOCK):
        return f"scales must be per {BLOCK}x{BLOCK} block of the weight, not per {block_n}x{block_k}"
    if layout != "plain":
        return f"the weight must be in layout plain, not {layout}"
    if n % BLOCK or k % BLOCK:
        return f"N and K must be multiples of {BLOCK}, not {n} and {k}"
    if x.dtype != torch.bfloat16:
        return f"x must be bfloat16, not {x.dtype}"
    return empty(x, n)


def run(x: Tensor, data: Tensor, scale: Tensor, *rest: Any) -> Tensor:
    *_, act, _, bias = rest
    q = rounded(x, act)
    m = q.data.shape[0]
    codes = F.pad(q.data.view(torch.uint8), (0, 0, 0, -m % UNIT)).view(q.data.dtype)
    x_scale = F.pad(q.scale, (0, 0, 0, -m % UNIT)).t().contiguous().t()
    w_scale = F.pad(scale.float(), (0, -scale.shape[1] % UNIT)).t()
    kinds = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    y = F.scaled_mm(codes, aligned(data).t(), x_scale, kinds[0], w_scale, kinds[1], output_dtype=x.dtype)
    return finish(y[:m], x, bias)
