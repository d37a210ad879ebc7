"""torch's own weight-only products for the CPU."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from bench.peers.base import Prepared, int4_groups, int4_value, int8_rows, int8_value, undivided

PACKAGES = ("torch",)
VARIANTS = {"int4": "4-bit", "int8": "8-bit"}


def prepare(variant: str, weight: Tensor, group: int, copies: int) -> Prepared | str:
    return _int4(weight, group, copies) if variant == "int4" else _int8(weight, copies)


def _int4(weight: Tensor, group: int, copies: int) -> Prepared | str:
    n, k = weight.shape
    if reason := undivided(k, group):
        return reason
    if n % 16:
        return f"{n} outputs are not a multiple of 16"
    codes, scale = int4_groups(weight, group)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    both = torch.stack([scale.t(), torch.zeros_like(scale.t())], -1).bfloat16().contiguous()  # [k / group, n, 2]
    every = [(packed.clone(), both.clone()) for _ in range(copies)]

    def run(data: Tensor, scales: Tensor, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, data, group, scales)
        return y

    calls = [functools.partial(run, *each) for each in every]
    return Prepared(calls, lambda: int4_value(codes, scale), packed.nbytes + both.nbytes)


def _int8(weight: Tensor, copies: int) -> Prepared:
    codes, scale = int8_rows(weight)
    scales = scale.bfloat16()
    every = [(codes.clone(), scales.clone()) for _ in range(copies)]

    def run(data: Tensor, scales: Tensor, x: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(x, data, scales)

    calls = [functools.partial(run, *each) for each in every]
    return Prepared(calls, lambda: int8_value(codes, scale), codes.nbytes + scales.nbytes)
