"""SignRound: learn which of its two neighbours each weight is rounded to, and the ends of each block's range.

    minimize    tr(E H E^T),   E = W - Q,   H = X^T X over the inputs of the layer

    Q = s (clamp(round(T / s + V) + z) - z)         V in [-1/2, 1/2], initially 0
    low, high = beta low_0, alpha high_0            s = (high - low) / (2^b - 1),  z = -low / s

All are updated by the sign of their gradient, with a step size that decays linearly from 1 / steps to 0. Rounding is
differentiated as the identity, and clamped elements have no gradient. The gradient in Q is -2 E H: one product per step
gives both the gradient and the error, and the inputs are not needed again. Formats without a zero point have one factor
for both ends, those with power-of-two scales none. If numbers are not evenly spaced, V is in units of the gap that
contains T / s.

T is W, moved to where it rounds to the initial codes. Each row (rows that share a scale: all of them together) keeps
the best that it saw, including the start and rounding to nearest; from there coordinate descent
(:mod:`bitport.algorithms.sweeps_core`) continues until no single code can be improved, or for ``sweeps`` at most.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitport.algorithms.block_params import choose, codes_of, rounded, scale_as_stored
from bitport.algorithms.spacing import snapped, within
from bitport.algorithms.sweeps_core import sweep
from bitport.numerics import (
    Format,
    Params,
    block_scale,
    choose_qparams,
    dequantize_codes,
    expand,
    from_blocks,
    spread,
    to_blocks,
)


def solve(
    w: Tensor, hessian: Tensor, fmt: Format, codes: Tensor, start: Params, steps: int, sweeps: int
) -> tuple[Tensor, Params]:
    """Improve the given codes and parameters of w [N, K]; returns uint8 codes [N, K]. ``hessian``: float32 [K, K]."""
    n, k = w.shape
    best, kept = start, dequantize_codes(codes, fmt, *start)
    target = within(to_blocks(w, fmt.block), to_blocks(kept, fmt.block), fmt, start)
    offset, ends = torch.zeros_like(target), Ends(fmt, start)
    least = summed_by_scale(row_errors(w - kept, hessian)[1], fmt)

    def judge(q: Tensor, params: Params) -> Tensor:
        nonlocal best, kept, least
        slope, errors = row_errors(q - w, hessian)
        loss = summed_by_scale(errors, fmt)
        better = loss < least
        best, least = choose(better, params, best), loss.where(better, least)
        kept = torch.where(expand(better, (fmt.block[0], 1), n, 1), q, kept)
        return slope

    plain = choose_qparams(w, fmt)
    judge(rounded(w, fmt, plain), plain)
    for step in range(steps):
        params, rate = ends.params(), (1 - step / steps) / steps
        scale = spread(block_scale(params.scale, params.scale2))
        units = target / scale
        value, inside = snapped(units, offset, fmt, params)
        uphill = to_blocks(judge(from_blocks(value * scale, n, k), params), fmt.block)
        ends.move(rate, uphill, value, units, inside)
        offset.sub_(uphill.mul_(inside).sign_(), alpha=rate).clamp_(-0.5, 0.5)
    codes = codes_of(kept, fmt, best)
    return sweep(w, hessian, fmt, codes, best, sweeps), best


def row_errors(error: Tensor, hessian: Tensor) -> tuple[Tensor, Tensor]:
    """E H and diag(E H E^T)."""
    product = error @ hessian
    return product, (product * error).sum(-1)


def summed_by_scale(loss: Tensor, fmt: Format) -> Tensor:
    """[N] to [SN, 1]: the sum over the rows that share a scale."""
    return to_blocks(loss[:, None], (fmt.block[0], 1)).sum((-3, -1))


class Ends:
    """The learned factors of the ends of each block's range, and the parameters that result from them."""

    def __init__(self, fmt: Format, start: Params) -> None:
        self.fmt, self.start = fmt, start
        scale = block_scale(start.scale, start.scale2)
        self.high_factor, self.low_factor = torch.ones_like(scale), torch.ones_like(scale)
        if start.zero is not None:
            self.low, self.high = -start.zero.float() * scale, (fmt.number.qmax - start.zero.float()) * scale
        else:
            self.high = scale

    def params(self) -> Params:
        if self.start.zero is None:
            if self.fmt.scale == "e8m0":
                return self.start
            return Params(scale_as_stored(self.high * self.high_factor, self.start), None, self.start.scale2)
        low, high = self.low * self.low_factor, self.high * self.high_factor
        scale = scale_as_stored((high - low) / self.fmt.number.qmax, self.start)
        zero = (-low / scale.float()).clamp(0, self.fmt.number.qmax)
        zero = zero.round() if self.fmt.zero == "int" else zero
        return Params(scale, zero.to(self.start.zero.dtype), None)

    def move(self, rate: float, uphill: Tensor, value: Tensor, units: Tensor, inside: Tensor) -> None:
        """Update the factors. ``uphill``: the gradient in Q. With u = T / s, dQ/ds = value - u inside, dQ/dz = -s
        outside."""
        if self.fmt.scale == "e8m0":
            return
        by_scale = (uphill * (value - units * inside)).sum((-3, -1))
        if self.start.zero is None:
            self.high_factor.sub_(by_scale.sign(), alpha=rate)
            return
        low, high = self.low * self.low_factor, self.high * self.high_factor
        scale = (high - low) / self.fmt.number.qmax
        by_zero = -scale * (uphill * ~inside).sum((-3, -1))
        by_high = (by_scale + by_zero * low / scale.square()) / self.fmt.number.qmax
        by_low = -by_high - by_zero / scale
        self.high_factor.sub_((by_high * self.high).sign(), alpha=rate)
        self.low_factor.sub_((by_low * self.low).sign(), alpha=rate)
