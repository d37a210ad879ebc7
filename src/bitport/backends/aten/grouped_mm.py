"""grouped_linear by ``aten::_grouped_mm(x [T, K], [E, K, N], ends)``, after dequantizing the experts' weights.

This temporarily needs memory for all experts in x's dtype. The bounds stay on the device, so nothing synchronizes on
them and nothing checks them. PyTorch leaves the rows past the last end uninitialized; here they become zeros.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bitport.backends.aten import empty, rows
from bitport.ops.select import CHOOSERS


def refuses(x: Tensor, ends: Tensor, *rest: Any) -> str | None:
    n, k = rest[5:7]
    if x.dtype != torch.bfloat16:
        return f"x must be bfloat16, not {x.dtype}"
    if n % 8 or k % 8:
        return f"N and K must be multiples of 8 (16 bytes of bfloat16), not {n} and {k}"
    return empty(x, n) or no_experts(ends)


def no_experts(ends: Tensor) -> str | None:
    return None if ends.numel() else "there are no experts"


def run(x: Tensor, ends: Tensor, *weight: Any) -> Tensor:
    dense = CHOOSERS["dequantize"](*weight, x.dtype)
    return owned(F.grouped_mm(rows(x), dense.transpose(-2, -1), offs=ends), ends)


def owned(y: Tensor, ends: Tensor) -> Tensor:
    """Return y with the rows past the last end zeroed."""
    row = torch.arange(y.shape[0], dtype=ends.dtype, device=y.device)
    return y.masked_fill((row >= ends[-1])[:, None], 0)
