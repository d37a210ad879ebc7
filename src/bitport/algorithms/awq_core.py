"""Activation-aware weight quantization: the scale of the input channels that keeps the outputs of rounded weights.

With G = sum of x x^T over the inputs and Q rounding to nearest, over scales s of the channels:

    minimize    tr(E G E^T),    E = Q(W diag(s)) diag(1/s) - W

that is the error of the outputs on the calibration data; of all weights that share the input together. Candidates are
x^alpha and x^alpha / w^(1 - alpha), alpha in steps: x the root mean square of a channel's inputs, w the mean of its
weights relative to the largest in their block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bitport.algorithms.gptq_core import objective
from bitport.algorithms.parts import Params, rounded
from bitport.algorithms.scales_core import Found, best, few_rows, power, to_channels
from bitport.numerics import Format, choose_qparams, expand, to_blocks


class Factor(NamedTuple):
    """A weight [.., N, K] and what goes into it. ``channels`` [K]: where in the scale its inputs are."""

    w: Tensor
    fmt: Format
    gram: Tensor
    rows: Tensor
    channels: Tensor


def search(factors: Sequence[Factor], shape: tuple[int, ...], steps: int = 20) -> Found:
    """``shape``: of the scale, the channels last; before them matrices that have scales of their own."""
    factors = [factor._replace(w=few_rows(factor.w, factor.fmt)) for factor in factors]
    ones = torch.ones(shape, device=factors[0].w.device)

    def error(scale: Tensor) -> Tensor:
        return sum((_error(factor, scale) for factor in factors), scale.new_zeros(shape[:-1]))

    return best(_candidates(factors, shape, steps), error, ones)


def _error(factor: Factor, scale: Tensor) -> Tensor:
    own = scale[..., factor.channels].unsqueeze(-2)
    w = (factor.w.float() * own).to(factor.w.dtype)
    difference = rounded(w, factor.fmt, Params(*choose_qparams(w, factor.fmt))) / own - factor.w.float()
    losses = objective(difference, factor.gram).sum(-1)
    return losses if scale.dim() > 1 else losses.sum()


def _candidates(factors: Sequence[Factor], shape: tuple[int, ...], steps: int) -> Iterator[Tensor]:
    squares, rows = (torch.stack(each).sum(0) for each in zip(*(_squares(f, shape) for f in factors), strict=True))
    x = (squares / rows.clamp(min=1)).sqrt()
    w = torch.stack([_weights(factor, shape) for factor in factors]).sum(0)
    for step in range(1, steps + 1):
        yield power(x, step / steps, w, 0.0)
    for step in range(steps):
        yield power(x, step / steps, w, 1 - step / steps)


def _squares(factor: Factor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The sum of the squares of each channel's inputs, and how many rows there were."""
    squares, rows = factor.gram.diagonal(dim1=-2, dim2=-1), factor.rows[..., None].float()
    if len(shape) == 1:
        squares, rows = squares.reshape(-1, squares.shape[-1]).sum(0), rows.sum()
    return to_channels(squares, factor.channels, shape[-1]), rows


def _weights(factor: Factor, shape: tuple[int, ...]) -> Tensor:
    size = factor.w.float().abs()
    n, k = size.shape[-2:]
    largest = expand(to_blocks(size, factor.fmt.block).amax((-3, -1)), factor.fmt.block, n, k)
    mean = (size / largest.clamp(min=torch.finfo(torch.float32).tiny)).mean(-2)
    if len(shape) == 1:
        mean = mean.reshape(-1, k).mean(0)
    return to_channels(mean, factor.channels, shape[-1])
