"""What all kernels in CUDA C++ require of a weight."""

from __future__ import annotations

import torch
from torch import Tensor

from bitport.backends.aten import empty
from bitport.ops import Weight

TYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}
"""dtype of x and the scale -> its name in PTX."""
FLIPPED = {"plain": 0, "signed_int8": 0x80}
"""Layout that the kernels read -> bits of a code that are inverted in it."""


def refuses(number: str, x: Tensor, weight: Weight, step: int) -> str | None:
    """``number``: required type of the weight; ``step``: columns that the kernel multiplies at a time."""
    if weight.dtype != number or weight.layout not in FLIPPED:
        allowed = " or ".join(FLIPPED)
        return f"the weight must be {number} in layout {allowed}, not {weight.dtype} in {weight.layout}"
    if x.dtype not in TYPES or weight.scale.dtype != x.dtype:
        return f"x and the scale must both be bfloat16 or both float16, not {x.dtype} and {weight.scale.dtype}"
    if weight.zero is not None and weight.zero.dtype != torch.uint8:
        return f"zeros must be uint8, not {weight.zero.dtype}"
    if weight.scale2 is not None:
        return "a scale of the scales is not taken"
    if reason := empty(x, weight.n):
        return reason
    if weight.k % step or weight.k % weight.block_k or weight.block_n != 1:
        return f"K must be a multiple of {step} and of the scale's blocks, which are of one row; K is {weight.k}"
    return None
