"""dyn_linear by ``aten::_scaled_mm``: float8 x float8, both with one scale per row or both with one per tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitport.backends.aten import aligned, empty, rounded

BLOCKS = {"fp8": "row", "fp8-tensor": "tensor", "fp8-e5m2-tensor": "tensor"}


def refuses(dtypes: tuple[torch.dtype, ...], *args: Any) -> str | None:
    x, _, _, _, scale2, dtype, n, k, block_n, block_k, layout, act, _, _ = args
    if dtype != "float8_e4m3" or scale2 is not None:
        return f"the weight must be float8_e4m3, not {dtype}"
    if act not in BLOCKS:
        return f"the input must be rounded as {' or '.join(BLOCKS)}, not {act}"
    whole = block_k >= k and (block_n == 1 if act == "fp8" else block_n >= n)
    if not whole:
        return f"{act} needs one weight scale per {BLOCKS[act]}, not per {block_n}x{block_k} block"
    if layout != "plain":
        return f"the weight must be in layout plain, not {layout}"
    if n % 16 or k % 16:
        return f"N and K must be multiples of 16, not {n} and {k}"
    if x.dtype not in dtypes:
        return f"x must be {' or '.join(map(str, dtypes))}, not {x.dtype}"
    return empty(x, n)


def run(x: Tensor, data: Tensor, scale: Tensor, *rest: Any) -> Tensor:
    *_, act, act_scale, bias = rest
    q = rounded(x, act, act_scale)
    bias = None if bias is None else bias.to(x.dtype).contiguous()  # the kernel ignores its strides
    scales = q.scale, scale.float().contiguous().t()
    y = torch._scaled_mm(q.data, aligned(data).t(), *scales, bias=bias, out_dtype=x.dtype)
    return y.reshape(*x.shape[:-1], y.shape[-1])
