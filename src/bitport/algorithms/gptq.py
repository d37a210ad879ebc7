"""GPTQ for a weight: each matrix separately, with its own inputs."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from bitport.algorithms.block_params import choose, stored
from bitport.algorithms.clip_core import search
from bitport.algorithms.gptq_core import diagonal_mean, nearer, solve
from bitport.algorithms.pieces import stacked
from bitport.arguments import check_options
from bitport.calibrate.inputs import Inputs
from bitport.numerics import Format, Quantized, choose_qparams, quantize

KINDS = ("linear", "experts", "attention", "recurrent")
"""Kinds of weights whose error is that of a product with their inputs."""


def hessian_of(inputs: Inputs, shrinkage: float, device: torch.device) -> Tensor:
    """H for GPTQ. ``shrinkage`` is the share of each diagonal element that is added to it, so that what channels have
    in common counts for 1 / (1 + shrinkage). In calibration data that is partly chance, and errors along common
    directions are compensated by errors along rare ones that may be as large as the weights: tokens that use these
    would be lost."""
    hessian = inputs.gram.to(device, copy=True)
    hessian.diagonal().mul_(1 + shrinkage)
    return hessian


def refused_kind(name: str, kind: str) -> str | None:
    return None if kind in KINDS else f"{name} is for the weights of products, not for those of modules of kind {kind}"


@dataclasses.dataclass(frozen=True)
class GPTQ:
    """Rounds column by column; the columns not yet rounded compensate for the error in the outputs on the
    calibration data.

    ``damping``, ``block`` and ``sort``: as in :mod:`bitport.algorithms.gptq_core`. ``clip``: search the ranges of
    the blocks first, each column weighted by the mean square of its inputs; rows (of blocks) whose output comes out
    closer by rounding to nearest in the widest range are rounded that way. ``shrinkage``: as in :func:`hessian_of`."""

    damping: float = 0.01
    block: int = 128
    sort: bool = True
    clip: bool = True
    shrinkage: float = 0.3
    name: ClassVar[str] = "gptq"
    needs_inputs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_options(self, damping=0.0, block=1, shrinkage=0.0)

    def refuses(self, fmt: Format, kind: str) -> str | None:
        return refused_kind(self.name, kind)

    def solve(self, w: Tensor, fmt: Format, inputs: Inputs | None) -> Quantized:
        assert inputs is not None
        if w.dim() > 2:
            return stacked([self.solve(matrix, fmt, inputs[at]) for at, matrix in enumerate(w)])
        if not inputs.any_rows:
            return quantize(w, fmt)
        hessian = hessian_of(inputs, self.shrinkage, w.device)
        power = hessian.diagonal() + self.damping * diagonal_mean(hessian)
        plain = choose_qparams(w, fmt)
        params = search(w, fmt, power) if self.clip else plain
        codes = solve(w, hessian, fmt, params, self.damping, self.block, self.sort)
        height = fmt.block_shape(*w.shape)[0] if self.clip else 1
        codes, lost = nearer(w, hessian, fmt, codes, params, plain, height)
        return stored(codes, fmt, choose(lost, plain, params) if self.clip else plain)
