"""NVIDIA CUDA: PyTorch's own kernels, each with its limits there, and some in CUDA C++ (kernels/).

``aten::_weight_int8pack_mm`` is not used: its CUDA kernel computes in float32, one thread per result, with strided
reads of the weight. ROCm, whose device type is cuda too, gets only dense_mm, which is made of ordinary products.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bitport.backends.aten import (
    dense_mm,
    from_rows,
    grouped_mm,
    int_mm,
    scaled_grouped_mm,
    scaled_mm,
    scaled_mm_blocks,
    scaled_mm_mx,
)
from bitport.backends.cuda import capability, few_rows, int4pack_mm, many_rows
from bitport.ops import Impl, register_kernel

INT_MM_ROWS = 17
"""For int8 cuBLAS requires more than 16 rows."""
FP8_RESULTS = (torch.bfloat16,)
"""With scales per row only bf16 results exist, and float8 tensor cores keep fewer than 24 bits of a sum."""
DENSE = dense_mm.Costs(("tile_packed_2", "tile_packed_4", "tile_packed_8"), rows_per_pass=16, moved=68)
"""The tiles of tinygemm have 16 rows. Torch ops, one after another, dequantize its weight."""


def int_mm_refuses(*args: Any) -> str | None:
    n, k = args[6:8]
    if n % 8 or k % 8:
        return f"N and K must be multiples of 8, not {n} and {k}"
    return int_mm.refuses("signed_int8", *args) or capability.below(args[0].device, 7, 5)


def scaled_mm_refuses(*args: Any) -> str | None:
    return scaled_mm.refuses(FP8_RESULTS, *args) or capability.below(args[0].device, 8, 9)


def scaled_mm_blocks_refuses(*args: Any) -> str | None:
    """cuBLAS supports these blocks on Hopper only, since CUDA 12.9."""
    wrong = scaled_mm_blocks.refuses(*args) or capability.other_than(args[0].device, 9)
    return wrong or capability.built_before(12, 9)


def scaled_mm_mx_refuses(*args: Any) -> str | None:
    wrong = scaled_mm_mx.refuses(*args) or capability.below(args[0].device, 10, 0)
    return wrong or capability.built_before(12, 8)


def grouped_mm_refuses(*args: Any) -> str | None:
    """On other devices PyTorch copies the bounds to the host and multiplies expert by expert."""
    return grouped_mm.refuses(*args) or capability.other_than(args[0].device, 9, 10)


def scaled_grouped_mm_refuses(*args: Any) -> str | None:
    return scaled_grouped_mm.refuses(*args) or capability.other_than(args[0].device, 9)


def _by_hand(name: str, run: Callable[..., Tensor], refuses: Callable[..., str | None]) -> Impl:
    """A kernel of linear in CUDA C++."""
    return Impl("linear", name, "cuda", run, from_rows(name, refuses))


for _kernel in (
    Impl("linear", "dense_mm", "cuda", dense_mm.run, partial(dense_mm.refuses, DENSE), priority=5),
    _by_hand("few_rows", few_rows.run, partial(few_rows.refuses, "int4")),
    _by_hand("few_rows_int8", few_rows.run, partial(few_rows.refuses, "int8")),
    _by_hand("many_rows", many_rows.run, partial(many_rows.refuses, "int4")),
    _by_hand("many_rows_int8", many_rows.run, partial(many_rows.refuses, "int8")),
    Impl("linear", "int4pack_mm", "cuda", int4pack_mm.run, int4pack_mm.refuses),
    Impl("int4pack_mm", "aten", "cuda", int4pack_mm.as_is, int4pack_mm.as_is_refuses),
    Impl("dyn_linear", "int_mm", "cuda", partial(int_mm.run, INT_MM_ROWS), from_rows("int_mm", int_mm_refuses)),
    Impl("dyn_linear", "scaled_mm", "cuda", scaled_mm.run, from_rows("scaled_mm", scaled_mm_refuses)),
    Impl(
        "dyn_linear",
        "scaled_mm_blocks",
        "cuda",
        scaled_mm_blocks.run,
        from_rows("scaled_mm_blocks", scaled_mm_blocks_refuses),
    ),
    Impl("dyn_linear", "scaled_mm_mx", "cuda", scaled_mm_mx.run, from_rows("scaled_mm_mx", scaled_mm_mx_refuses)),
    Impl(
        "grouped_linear",
        "grouped_mm",
        "cuda",
        grouped_mm.run,
        from_rows("grouped_mm", grouped_mm_refuses, experts=True),
    ),
    Impl("dyn_grouped_linear", "scaled_grouped_mm", "cuda", scaled_grouped_mm.run, scaled_grouped_mm_refuses),
):
    register_kernel(_kernel)
