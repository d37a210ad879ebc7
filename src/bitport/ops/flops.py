"""FLOP formulas of quantized matmuls for PyTorch's flop counters, which count unknown ops as zero."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

PRODUCTS = ("linear", "dyn_linear", "linear_then", "dyn_linear_then", "grouped_linear", "dyn_grouped_linear")


def _flops(x: Tensor, *args: Any, out_val: Tensor) -> int:
    """y [.., N] = x [.., K] W^T: K multiplications and additions per element of y, also with experts."""
    return 2 * out_val.numel() * x.shape[-1]


def tell_counters() -> None:
    """Register the formulas with the active flop counters. Their module is not imported here, as it imports triton."""
    kind: Any = getattr(sys.modules.get("torch.utils.flop_counter"), "_FlopCounterMode", ())
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, kind):
            mode.counter.flop_registry |= {getattr(torch.ops.bitport, name): _flops for name in PRODUCTS}
