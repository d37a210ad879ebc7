"""Apple MPS: PyTorch's own Metal kernels."""

from __future__ import annotations

from functools import partial
from typing import Any

from bitport.backends.aten import dense_mm, int8pack_mm
from bitport.backends.mps import int4pack_mm
from bitport.ops import Impl, register_kernel

DENSE = dense_mm.Costs(("int4_pairs",), rows_per_pass=1, moved=32)
"""The int4 kernel is a matrix-vector product for each row. Torch ops dequantize a weight, in about ten passes that move
three bytes each."""


def int8pack_mm_refuses(*args: Any) -> str | None:
    n, k = args[6:8]
    if n % 32 or k % 32:
        return f"N and K must be multiples of 32, not {n} and {k}"
    return int8pack_mm.refuses("signed_int8", *args)


register_kernel(Impl("linear", "dense_mm", "mps", dense_mm.run, partial(dense_mm.refuses, DENSE), priority=5))
register_kernel(Impl("linear", "int4pack_mm", "mps", int4pack_mm.run, int4pack_mm.refuses))
register_kernel(Impl("linear", "int8pack_mm", "mps", int8pack_mm.run, int8pack_mm_refuses))
