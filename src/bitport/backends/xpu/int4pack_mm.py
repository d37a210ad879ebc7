"""linear by ``aten::_weight_int4pack_mm_with_scales_and_zeros``, which exists only on XPU::

    x [M, K] bf16 or fp16    weight int32 [N, K/8]    scale [K/g, N] in x's dtype    zero int8 [K/g, N]

value = (code - zero) * scale with codes 0 to 15. Layout plain_int32 stores weight and scale in this form. PyTorch's
meta function checks less than the kernel, so calls that are refused here would trace and then fail.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitport.backends.aten import empty, finish, rows


def refuses(*args: Any) -> str | None:
    x, _, scale, zero, scale2, dtype, n, k, block_n, block_k, layout, _ = args
    if dtype != "int4" or scale2 is not None:
        return f"the weight must be int4, not {dtype}"
    if zero is not None and zero.is_floating_point():
        return "the zero point must be an integer"
    if block_n != 1 or block_k % 32 or k % block_k:
        return f"scales must be per row and group of 32, 64, .. that divides K={k}, not per {block_n}x{block_k} block"
    if layout != "plain_int32":
        return f"the weight must be in layout plain_int32, not {layout}"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"x must be bfloat16 or float16, not {x.dtype}"
    if scale.dtype != x.dtype:
        return f"scale and x must be of one dtype, not {scale.dtype} and {x.dtype}"
    return empty(x, n)


def run(x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, *rest: Any) -> Tensor:
    group = rest[5]
    if zero is None:
        zeros = torch.full_like(scale, 8, dtype=torch.int8)
    else:
        zeros = zero.t().to(torch.int8, memory_format=torch.contiguous_format)
    y = torch.ops.aten._weight_int4pack_mm_with_scales_and_zeros(rows(x), data, group, scale, zeros)
    return finish(y, x, rest[-1])
