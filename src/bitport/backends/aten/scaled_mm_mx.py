"""dyn_linear by ``aten::_scaled_mm_v2`` on tensor cores that apply block scales themselves: mxfp8 and nvfp4.

They require scales [rows, blocks] in the order of bitport.numerics.swizzle, which PyTorch calls SWIZZLE_32_4_4.
mxfp4 is missing: PyTorch supports it only if built with another library, and there is no way to query that.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from bitport.backends.aten import aligned, empty, finish, rounded
from bitport.numerics.swizzle import swizzled

FORMATS = {"mxfp8": ("float8_e4m3", torch.float8_e8m0fnu, 32), "nvfp4": ("float4_e2m1", torch.float8_e4m3fn, 16)}
"""Activation format -> what the weight must have: number type, dtype of the scale, columns per scale."""


def refuses(*args: Any) -> str | None:
    x, _, scale, _, scale2, dtype, n, k, block_n, block_k, layout, act, _, _ = args
    if act not in FORMATS:
        return f"the input must be rounded as {' or '.join(FORMATS)}, not {act}"
    wanted, scale_dtype, block = FORMATS[act]
    if (dtype, scale.dtype, scale2 is not None) != (wanted, scale_dtype, act == "nvfp4"):
        return f"with {act} inputs the weight must be {act} as well, not {dtype} with scales of {scale.dtype}"
    if (block_n, block_k) != (1, block):
        return f"scales must be per 1x{block} block, not per {block_n}x{block_k}"
    if layout != "plain":
        return f"the weight must be in layout plain, not {layout}"
    if n % 16 or k % 32:
        return f"N must be a multiple of 16 and K of 32, not {n} and {k}"
    if x.dtype != torch.bfloat16:
        return f"x must be bfloat16, not {x.dtype}"
    return empty(x, n)


def run(x: Tensor, data: Tensor, scale: Tensor, zero: None, scale2: Tensor | None, *rest: Any) -> Tensor:
    *_, act, act_scale, bias = rest
    q = rounded(x, act, act_scale)
    a, b = [swizzled(q.scale).flatten()], [swizzled(scale).flatten()]
    codes, swizzles = (q.data, aligned(data)), [SwizzleType.SWIZZLE_32_4_4]
    kinds = [ScalingType.BlockWise1x32]
    if q.scale2 is not None and scale2 is not None:
        kinds = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
        swizzles = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
        a, b = [*a, q.scale2.reshape(1)], [*b, scale2.reshape(1)]
        codes = codes[0].view(torch.float4_e2m1fn_x2), codes[1].view(torch.float4_e2m1fn_x2)
    y = F.scaled_mm(codes[0], codes[1].t(), a, kinds, b, kinds, swizzles, swizzles, output_dtype=x.dtype)
    return finish(y, x, bias)
