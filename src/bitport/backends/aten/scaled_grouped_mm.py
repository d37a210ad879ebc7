"""dyn_grouped_linear by ``aten::_scaled_grouped_mm``: float8 x float8 with one scale per row on both sides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitport.backends.aten import aligned, grouped_mm, rounded, scaled_mm


def refuses(x: Tensor, ends: Tensor, *rest: Any) -> str | None:
    if rest[10] != "fp8":
        return f"the input must be rounded as fp8, not {rest[10]}"
    as_linear = (x, *rest, None, None)
    return scaled_mm.refuses((torch.bfloat16,), *as_linear) or grouped_mm.no_experts(ends)


def run(x: Tensor, ends: Tensor, data: Tensor, scale: Tensor, *rest: Any) -> Tensor:
    q = rounded(x, rest[-1])
    scales = q.scale.reshape(-1), scale.float().reshape(scale.shape[:2]).contiguous()
    y = torch._scaled_grouped_mm(q.data, aligned(data).transpose(-2, -1), *scales, offs=ends, out_dtype=x.dtype)
    return grouped_mm.owned(y, ends)
