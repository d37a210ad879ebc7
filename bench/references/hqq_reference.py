"""HQQ's own proximal solver, in eager mode. It stops when the mean error no longer falls, after a few steps; ours runs
all of its steps."""

from __future__ import annotations

import torch
from hqq.core.quantize import Quantizer
from torch import Tensor

from bitport.algorithms import HQQ

PACKAGES = ("hqq",)
SCHEME, ALGORITHM = "int4-fzero", HQQ()


def solve(weight: Tensor, x: Tensor) -> Tensor:
    codes, meta = Quantizer.quantize(
        weight, nbits=4, group_size=128, axis=1, compute_dtype=torch.float32, device="cpu", bitpack=False
    )
    return Quantizer.dequantize(codes, meta).float().reshape(weight.shape)
