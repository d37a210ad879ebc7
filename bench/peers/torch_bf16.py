"""The unquantized weight in bfloat16, by eager F.linear and as compiled by torch.compile with freezing; and in float32,
which may be faster on processors without a bfloat16 unit.

Freezing reorders the weight for oneDNN once and calls ``mkldnn::_linear_pointwise``; here it is called without the
compiled frame around it, which is in its favour.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.peers.base import Prepared

PACKAGES = ("torch",)
VARIANTS = {"bf16": "bf16", "bf16 prepacked": "bf16", "f32": "f32"}


def prepare(variant: str, weight: Tensor, group: int, copies: int) -> Prepared | str:
    if variant == "f32":
        wide = weight.float()
        every = [wide.clone() for _ in range(copies)]
        return Prepared([functools.partial(_eager, w) for w in every], weight.double, wide.nbytes, accept=_float32)
    every = [weight.clone() for _ in range(copies)]
    if variant == "bf16":
        calls = [functools.partial(_eager, w) for w in every]
    elif not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "oneDNN has no bfloat16 on this processor"
    else:
        calls = [functools.partial(_prepacked, torch.ops.mkldnn._reorder_linear_weight(w)) for w in every]
    return Prepared(calls, weight.double, weight.nbytes)


def _float32(x: Tensor) -> Tensor:
    return x.float()


def _eager(weight: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, weight)


def _prepacked(weight: Tensor, x: Tensor) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return y
