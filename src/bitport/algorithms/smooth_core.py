"""SmoothQuant: scale the input channels so that rounding both the input and the weight costs the product least.

All numbers of a token's input share one scale: a channel that is large in every token leaves few steps to the others.
Dividing the channels by s and multiplying the columns of the weight by s moves that difficulty to the weight, which
has its own scales:

    s = max |x|^alpha / max |w|^(1 - alpha)

alpha is chosen, in steps from 0 to 1, to minimize the error of the product on a sample of the inputs X:

    minimize    |Q(X diag(1/s)) Q(W diag(s))^T - X W^T|^2
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bitport.algorithms.block_params import rounded
from bitport.algorithms.scales_core import Found, best, few_rows, power
from bitport.numerics import Format, choose_qparams, fake_quantize


class Factor(NamedTuple):
    """A weight [.., N, K], the rounding of its input, and (matrix index, inputs [M, K]). ``channels`` [K]: the index in
    the scale of each input."""

    w: Tensor
    fmt: Format
    act: str
    inputs: Sequence[tuple[tuple[int, ...], Tensor]]
    channels: Tensor


def search(factors: Sequence[Factor], shape: tuple[int, ...], steps: int = 20) -> Found:
    """``shape``: of the scale, channels last, preceded by the matrices that have their own scales."""
    thin = [factor._replace(w=few_rows(factor.w, factor.fmt)) for factor in factors]
    device = factors[0].w.device

    def error(scale: Tensor) -> Tensor:
        total = torch.zeros(shape[:-1], dtype=torch.float32, device=device)
        for factor in thin:
            for index, x in factor.inputs:
                total[index if scale.dim() > 1 else ()] += _error(factor, index, x.to(device), scale)
        return total

    return best(_candidates(factors, shape, steps), error, torch.ones(shape, dtype=torch.float32, device=device))


def _error(factor: Factor, index: tuple[int, ...], x: Tensor, scale: Tensor) -> Tensor:
    own, w = (scale[index] if scale.dim() > 1 else scale)[factor.channels], factor.w[index]
    scaled = (w.float() * own).to(w.dtype)
    q = rounded(scaled, factor.fmt, choose_qparams(scaled, factor.fmt))
    return (fake_quantize(x / own, factor.act) @ q.t() - x @ w.float().t()).square().sum()


def _candidates(factors: Sequence[Factor], shape: tuple[int, ...], steps: int) -> Iterator[Tensor]:
    x, w = (torch.zeros(shape, dtype=torch.float32, device=factors[0].w.device) for _ in range(2))
    for factor in factors:
        channels, count = factor.channels, factor.w.shape[-1]
        for index, rows in factor.inputs:
            at = index if len(shape) > 1 else ()
            for sizes, found in ((rows.to(x.device), x), (factor.w[index].float(), w)):
                found[at] = found[at].scatter_reduce(0, channels, sizes.abs().amax(0).reshape(count), "amax")
    for step in range(steps + 1):
        yield power(x, step / steps, w, 1 - step / steps)
