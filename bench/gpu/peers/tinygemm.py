"""``aten::_weight_int4pack_mm``: the int4 product that torch has had for CUDA since 2.2, called as its users do."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from bench.peers.base import Prepared, int4_groups, int4_value, undivided

PACKAGES = ("torch",)
VARIANTS = {"int4": "4-bit"}
INNER = 8
"""Tiles of 16 columns that a warp loads together."""


def prepare(variant: str, weight: Tensor, group: int, copies: int) -> Prepared | str:
    n, k = weight.shape
    if reason := undivided(k, group) or undivided(k, 16 * INNER):
        return reason
    if n % 8:
        return f"{n} outputs are not a multiple of 8"
    codes, scale = int4_groups(weight, group)
    packed = torch.ops.aten._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], INNER)
    both = torch.stack([scale.t(), torch.zeros_like(scale.t())], -1).bfloat16().contiguous()  # [k / group, n, 2]
    every = [(packed.clone(), both.clone()) for _ in range(copies)]

    def run(data: Tensor, scales: Tensor, x: Tensor) -> Tensor:
        return torch._weight_int4pack_mm(x, data, group, scales)

    calls = [functools.partial(run, *each) for each in every]
    return Prepared(calls, lambda: int4_value(codes, scale), packed.nbytes + both.nbytes)
