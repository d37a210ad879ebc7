"""Activation-aware weight quantization: scale the input channels so that rounded weights preserve the output.

With G = sum of x x^T over the inputs and Q rounding to nearest, over scales s of the channels:

    minimize    tr(E G E^T),    E = Q(W diag(s)) diag(1/s) - W

This is the error of the outputs on the calibration data, summed over all weights that share the input. Candidates are
x^alpha and x^alpha / w^(1 - alpha) for steps of alpha: x the root mean square of a channel's inputs, w the mean of its
weights relative to the largest in their block. Apart from small noise the error falls and then rises along alpha, so
each family is searched with large strides first, then with smaller ones around the best.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bitport.algorithms.block_params import rounded
from bitport.algorithms.gptq_core import objective
from bitport.algorithms.scales_core import Found, few_rows, power, to_channels
from bitport.numerics import Format, choose_qparams, expand, to_blocks

STRIDES = 5
"""The first pass over alpha, from 0 to 1, takes at least this many strides."""


class Factor(NamedTuple):
    """A weight [.., N, K] and statistics of its inputs. ``channels`` [K]: the index in the scale of each input."""

    w: Tensor
    fmt: Format
    gram: Tensor
    rows: Tensor
    channels: Tensor


def search(factors: Sequence[Factor], shape: tuple[int, ...], steps: int = 20) -> Found:
    """``shape``: of the scale, channels last, preceded by the matrices that have their own scales."""
    factors = [factor._replace(w=few_rows(factor.w, factor.fmt)) for factor in factors]
    x, w = sizes(factors, shape)
    plain = errors(factors, torch.ones_like(x))
    nothing = found = Found(torch.ones_like(x), plain, plain)
    for by in (w, w.sign()):
        best = _along(factors, nothing, x, by, steps)
        found = found.or_(best.scale, best.error)
    return found


def _along(factors: Sequence[Factor], found: Found, x: Tensor, w: Tensor, steps: int) -> Found:
    """The best of ``found`` and x^alpha / w^(1 - alpha), per matrix."""
    at = x.new_zeros(x.shape[:-1])

    def try_(step: Tensor) -> None:
        nonlocal found, at
        step = step.clamp(0, steps)
        alpha = (step / steps)[..., None]
        scale = power(x, alpha, w, 1 - alpha)
        error = errors(factors, scale)
        at = torch.where(error < found.error, step, at)
        found = found.or_(scale, error)

    stride = 2 ** max(0, int(math.log2(steps / STRIDES)))
    for step in range(0, steps + 1, stride):
        try_(torch.full_like(at, step))
    while stride > 1:
        stride //= 2
        around = at
        for step in (around - stride, around + stride):
            try_(step)
    return found


def errors(factors: Sequence[Factor], scale: Tensor) -> Tensor:
    return sum((_error(factor, scale) for factor in factors), scale.new_zeros(scale.shape[:-1]))


def _error(factor: Factor, scale: Tensor) -> Tensor:
    own, exact = scale[..., factor.channels].unsqueeze(-2), factor.w.float()
    w = (exact * own).to(factor.w.dtype)
    difference = (rounded(w, factor.fmt, choose_qparams(w, factor.fmt)) / own).sub_(exact)
    losses = objective(difference, factor.gram).sum(-1)
    return losses if scale.dim() > 1 else losses.sum()


def sizes(factors: Sequence[Factor], shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """x and w of each channel."""
    squares, rows = (torch.stack(each).sum(0) for each in zip(*(_squares(f, shape) for f in factors), strict=True))
    return (squares / rows.clamp(min=1)).sqrt(), torch.stack([_weights(factor, shape) for factor in factors]).sum(0)


def _squares(factor: Factor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The sum of squares of each channel's inputs, and the number of rows."""
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
