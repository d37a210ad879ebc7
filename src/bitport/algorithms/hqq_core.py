"""Half-quadratic quantization: fit scale and zero point of each block to a robust loss, without any data.

    minimize over scale s, zero z    sum over the block of |x - s (code - z)|^p,    p < 1

An exponent below 1 tolerates the few elements that clip and keeps all others close. The problem is not convex;
half-quadratic splitting adds an outlier o to the error e = x / s - (code - z) and alternates, with growing beta:

    code    nearest to x for the current s, z
    o       shrink(e) = sign(e) max(0, |e| - |e|^(p-1) / beta)
    s, z    least squares: x - s o against s (code - z)

The target of the fit is v + d, with the values v = code - z and d = e - o = sign(e) min(|e|, |e|^(p-1) / beta), so it
only needs four sums over the block. Without a zero point, s alone is fitted, against the decoded codes. An integer zero
point is rounded, then s is fitted again. Every step is judged by the loss of what would be stored; each block keeps the
best that it saw, including the start.

The loss alone would let the errors of the largest weights grow many times over, and published models depend on these
weights (docs/accuracy-real.md). So only steps are kept that do not raise the sum of the fourth powers of the errors, in
which the largest ones weigh most.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bitport.algorithms.block_params import choose, scale_as_stored
from bitport.algorithms.pieces import by_matrix, joined, nearest, part_of, pieces
from bitport.numerics import Format, Params, block_scale, choose_qparams, to_blocks

P, BETA, GROWTH = 0.7, 1.5, 1.1
SMALLEST = 1e-8
"""Lower bound of |e| in |e|^(p-1), which has a pole at 0."""


def solve(x: Tensor, fmt: Format, steps: int = 20, p: float = P) -> Params:
    return by_matrix(lambda matrix: _matrix(matrix, fmt, steps, p), x.float() if fmt.scale != "input" else x)


def _matrix(x: Tensor, fmt: Format, steps: int, p: float) -> Params:
    start, blocks = choose_qparams(x, fmt), to_blocks(x, fmt.block)
    held = None
    if blocks.numel() != x.numel():
        held = to_blocks(x.new_ones(1, 1, dtype=torch.float32).expand(x.shape), fmt.block)
    return joined(
        [
            _piece(blocks[at].float(), None if held is None else held[at], fmt, part_of(start, at), steps, p)
            for at in pieces(blocks)
        ]
    )


def _piece(x: Tensor, held: Tensor | None, fmt: Format, params: Params, steps: int, p: float) -> Params:
    """x [SN, bn, SK, bk]; ``held``: 1 for elements, 0 for padding; None if all blocks are full."""
    error, size, pull, fourth, other = (torch.empty_like(x) for _ in range(5))
    best, least, beta, start = params, None, BETA, block_scale(params.scale, params.scale2)
    ones: Tensor | float = float(x.shape[-3] * x.shape[-1]) if held is None else held.sum((-3, -1))
    for step in range(steps + 1):
        scale = block_scale(params.scale, params.scale2)
        error, values = nearest(x, fmt, scale, params.zero, (error, other))
        if held is not None:
            values.mul_(held)
        torch.abs(error.sub_(values), out=size)
        torch.clamp(size, min=SMALLEST, out=pull).log2_().mul_(p - 1).exp2_()  # pow_ is slower
        loss = _sum(size * pull) * scale**p
        large = _sum(torch.square(size, out=fourth).square_()) * (scale / start) ** 4
        if least is None:
            least, most = loss, large
        else:
            better = (loss < least) & (large <= most)
            best, least = choose(better, params, best), loss.where(better, least)
        if step < steps:
            pull = toward(error, size, pull, beta)
            sums = Sums(ones, _sum(values), _sum(pull), _sum(values * pull), _sum(values.square()))
            params = fit(sums, fmt, params)
            beta *= GROWTH
    return best


def toward(error: Tensor, size: Tensor, slope: Tensor, beta: float) -> Tensor:
    """Compute e - shrink(e) from e, |e| and |e|^(p-1), in place in the last."""
    return torch.minimum(slope.div_(beta), size, out=slope).copysign_(error)


class Sums(NamedTuple):
    """Sums over each block of 1, the values v, the pulls d, v d and v^2."""

    ones: Tensor | float
    v: Tensor
    d: Tensor
    vd: Tensor
    vv: Tensor


def _sum(x: Tensor) -> Tensor:
    return x.sum((-3, -1))


def fit(sums: Sums, fmt: Format, old: Params) -> Params:
    """Fit v + d, in units of the old scale, against v by least squares; a block with nothing to fit is left
    unchanged."""
    ones, v, d, vd, vv = sums
    scale = block_scale(old.scale, old.scale2)
    if old.zero is None:
        return Params(scale_as_stored(scale * _factor(1 + vd / vv), old), None, old.scale2)
    slope = _factor(1 + (vd - v * d / ones) / (vv - v.square() / ones))
    before = old.zero.float()
    zero = (before + (v - (v + d) / slope) / ones).clamp(0, fmt.number.qmax)
    zero = (zero.round() if fmt.zero == "int" else zero).to(old.zero.dtype)
    moved = zero.float() - before
    again = (vv + vd - moved * (v + d)) / (vv - 2 * moved * v + moved.square() * ones)
    return Params(scale_as_stored(scale * _factor(again), old), zero, None)


def _factor(of_scale: Tensor) -> Tensor:
    return torch.where(of_scale.isfinite() & (of_scale > 0), of_scale, 1.0)
