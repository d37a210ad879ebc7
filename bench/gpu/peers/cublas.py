"""The unquantized weight in bfloat16: F.linear, which is cuBLAS on CUDA, hipBLASLt on ROCm, oneDNN on XPU."""

from __future__ import annotations

import functools

import torch.nn.functional as F
from torch import Tensor

from bench.peers.base import Prepared

PACKAGES = ("torch",)
VARIANTS = {"bf16": "bf16"}


def prepare(variant: str, weight: Tensor, group: int, copies: int) -> Prepared | str:
    every = [weight.clone() for _ in range(copies)]
    return Prepared([functools.partial(_linear, w) for w in every], weight.double, weight.nbytes)


def _linear(weight: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, weight)
