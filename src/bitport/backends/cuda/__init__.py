"""NVIDIA CUDA: PyTorch's own kernels."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from bitport.backends.aten import int_mm, scaled_mm
from bitport.backends.cuda import capability, int4pack_mm
from bitport.ops import Impl, register_kernel

INT_MM_ROWS = 17
"""cuBLAS takes more than 16 rows of int8."""
FP8_RESULTS = (torch.bfloat16,)
"""Scales per row give bf16 alone, and float8 tensor cores keep fewer than 24 bits of a sum."""


def int_mm_refuses(*args: Any) -> str | None:
    n, k = args[6:8]
    if n % 8 or k % 8:
        return f"N and K must be multiples of 8, not {n} and {k}"
    return int_mm.refuses("signed_int8", *args) or capability.below(args[0].device, 7, 5)


def scaled_mm_refuses(*args: Any) -> str | None:
    return scaled_mm.refuses(FP8_RESULTS, *args) or capability.below(args[0].device, 8, 9)


register_kernel(Impl("linear", "int4pack_mm", "cuda", int4pack_mm.run, int4pack_mm.refuses))
register_kernel(Impl("dyn_linear", "int_mm", "cuda", partial(int_mm.run, INT_MM_ROWS), int_mm_refuses))
register_kernel(Impl("dyn_linear", "scaled_mm", "cuda", scaled_mm.run, scaled_mm_refuses))
