"""oneDNN's int8 product as exposed by torch: ``onednn::qlinear_pointwise`` with a prepacked weight, one scale per row.

It takes x in int8 with a single scale. Rounding x is not timed, in its favour: torch has no single-pass operation for
it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from bench.peers.base import Prepared, int8_rows, int8_value

PACKAGES = ("torch",)
VARIANTS = {"int8 prepacked": "8-bit x int8"}


def prepare(variant: str, weight: Tensor, group: int, copies: int) -> Prepared | str:
    codes, scale = int8_rows(weight)
    zeros = torch.zeros(codes.shape[0], dtype=torch.int32)
    every = [torch.ops.onednn.qlinear_prepack(codes.clone(), None) for _ in range(copies)]

    def run(packed: Tensor, x: tuple[Tensor, float]) -> Tensor:
        y: Tensor = torch.ops.onednn.qlinear_pointwise(
            *x, 0, packed, scale, zeros, None, 1.0, 0, torch.bfloat16, "none", [], ""
        )
        return y

    calls = [functools.partial(run, each) for each in every]
    return Prepared(calls, lambda: int8_value(codes, scale), codes.nbytes + scale.nbytes, accept=_rounded)


def _rounded(x: Tensor) -> tuple[Tensor, float]:
    scale = float(x.float().abs().max()) / 127
    return (x.float() / scale).round().clamp(-128, 127).to(torch.int8), scale
