"""bitport: one variant per scheme, with the kernel that the selector chooses."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

import bitport
from bench.peers.base import Prepared
from bench.suites import SCHEMES, class_of
from bitport.evaluate.speed import kernel_for

PACKAGES: tuple[str, ...] = ()  # identified by the commit
VARIANTS = {scheme: class_of(scheme) for scheme in SCHEMES}


def prepare(variant: str, weight: Tensor, group: int, copies: int) -> Prepared | str:
    q = bitport.quantize_tensor(weight, bitport.preset(variant))
    every = [q.map_parts(torch.clone) for _ in range(copies)]
    return Prepared(
        [functools.partial(_linear, each) for each in every],
        lambda: q.dequantize(torch.float32).double(),
        q.nbytes,
        note=functools.partial(kernel_for, q),
    )


def _linear(q: bitport.QTensor, x: Tensor) -> Tensor:
    return F.linear(x, q)
