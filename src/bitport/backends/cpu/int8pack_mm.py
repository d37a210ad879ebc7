"""linear by ``aten::_weight_int8pack_mm`` for a few rows of bfloat16: with more rows, or in another dtype, the generic
kernel is faster. PyTorch's kernel reads whole vectors along K without checks, so K must be a multiple of them, or it
reads past the end. The codes are made signed on every call, one pass over a byte per weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitport.backends.aten import int8pack_mm
from bitport.numerics.packing import to_signed

MOST_ROWS = 32
VECTOR = 32


def refuses(*args: Any) -> str | None:
    if reason := int8pack_mm.refuses("plain", *args):
        return reason
    x, k = args[0], args[7]
    if x.numel() > MOST_ROWS * k:
        return f"it is faster up to {MOST_ROWS} rows; x has {x.numel() // k}"
    if x.dtype != torch.bfloat16:
        return f"x must be bfloat16, not {x.dtype}"
    return f"K must be a multiple of {VECTOR}, not {k}" if k % VECTOR else None


def run(x: Tensor, data: Tensor, *rest: Any) -> Tensor:
    return int8pack_mm.run(x, to_signed(data), *rest)
