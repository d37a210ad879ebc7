"""bitport: one variant per scheme, with the kernel that the selector chooses."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

import bitport
from bench.peers.base import Prepared
from bench.suites import SCHEMES, class_of
from bitport.ops import decide
from bitport.ops.product import operand

PACKAGES: tuple[str, ...] = ()  # identified by the commit
VARIANTS = {scheme: class_of(scheme) for scheme in SCHEMES}


def prepare(variant: str, weight: Tensor, group: int, copies: int) -> Prepared | str:
    q = bitport.quantize_tensor(weight, bitport.preset(variant))
    every = [q.map_parts(torch.clone) for _ in range(copies)]
    return Prepared(
        [functools.partial(_linear, each) for each in every],
        lambda: q.dequantize(torch.float32).double(),
        q.nbytes,
        note=functools.partial(_kernel, q),
    )


def _linear(q: bitport.QTensor, x: Tensor) -> Tensor:
    return F.linear(x, q)


def _kernel(q: bitport.QTensor, x: Tensor) -> str:
    if q.scheme.act:
        return decide("dyn_linear", x, *operand(q), q.scheme.act, q.act_scale, None).kernel
    return decide("linear", x, *operand(q), None).kernel
