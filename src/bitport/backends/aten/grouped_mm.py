"""grouped_linear by ``aten::_grouped_mm(x [T, K], [E, K, N], ends)``, the experts' weights made dense first.

Memory for all experts in x's dtype is needed meanwhile. The bounds stay on the device: nobody waits for them, and
nobody checks them. PyTorch leaves rows past the last end as they lay in memory; here they become zeros.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bitport.backends.aten import rows
from bitport.ops.select import CHOOSERS


def refuses(x: Tensor, ends: Tensor, *rest: Any) -> str | None:
    n, k = rest[5:7]
    if x.dtype != torch.bfloat16:
        return f"x must be bfloat16, not {x.dtype}"
    if n % 8 or k % 8:
        return f"N and K must be multiples of 8 (16 bytes of bfloat16), not {n} and {k}"
    return empty(x, ends)


def empty(x: Tensor, ends: Tensor) -> str | None:
    return None if x.numel() and ends.numel() else "x has no rows, or there are no experts"


def run(x: Tensor, ends: Tensor, *weight: Any) -> Tensor:
    dense = CHOOSERS["dequantize"](*weight, x.dtype)
    return owned(F.grouped_mm(rows(x), dense.transpose(-2, -1), offs=ends), ends)


def owned(y: Tensor, ends: Tensor) -> Tensor:
    """y with zeros in the rows past the last end."""
    row = torch.arange(y.shape[0], dtype=ends.dtype, device=y.device)
    return y.masked_fill((row >= ends[-1])[:, None], 0)
