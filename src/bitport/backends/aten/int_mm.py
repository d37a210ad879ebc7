"""dyn_linear by ``aten::_int_mm``: int8 x int8 with exact int32 sums; scales are applied in float32.

y[m, n] = sum over k of (xq[m, k] * wq[n, k]) * x_scale[m] * scale[n] + bias[n]
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bitport.backends.aten import aligned, empty, finish, rounded
from bitport.numerics.packing import to_signed

INT8_ACTIVATIONS = ("int8", "int8-tensor")
LARGEST_K = (2**31 - 1) // (255 * 128)
"""Largest K for which a sum of products of unsigned by signed bytes cannot overflow int32."""


def refuses(layout: str, *args: Any) -> str | None:
    """Return why these arguments cannot be taken, or None; the weight must be in ``layout``."""
    x, _, _, zero, scale2, dtype, n, k, block_n, block_k, its_layout, act, _, _ = args
    if dtype != "int8" or zero is not None or scale2 is not None:
        return "the weight must be int8 without zero point"
    if act not in INT8_ACTIVATIONS:
        return f"the input must be rounded as {' or '.join(INT8_ACTIVATIONS)}, not {act}"
    if block_k < k or 1 < block_n < n:
        return f"scales must be one per row or one for all, not per {block_n}x{block_k} block"
    if its_layout != layout:
        return f"the weight must be in layout {layout}, not {its_layout}"
    if not 1 < k <= LARGEST_K:
        return (
            f"K must be from 2 to {LARGEST_K}, not {k}: with one column PyTorch reads past the end, with more the sums "
            "overflow"
        )
    return empty(x, n)


def run(least_rows: int, *args: Any) -> Tensor:
    """Multiply; fewer than ``least_rows`` rows are padded with zeros."""
    x, data, scale, *_, act, act_scale, bias = args
    q = rounded(x, act, act_scale)
    codes = to_signed(q.data)
    m = codes.shape[0]
    if m < least_rows:
        codes = F.pad(codes, (0, 0, 0, least_rows - m))
    sums = torch._int_mm(codes, aligned(data).t())[:m]
    return finish(sums.float().mul_(q.scale).mul_(scale.float().reshape(1, -1)), x, bias)
