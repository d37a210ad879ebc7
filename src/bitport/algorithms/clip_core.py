"""Clipping search: choose among several ranges per block by a power of the error.

Rounding to nearest uses the full range, so that nothing clips. A narrower range has finer steps; if only a few elements
are large, their loss is smaller than the gain of all others. For each block, over factors f of its range:

    minimize over f    sum over the block of importance_k * |x - q_f(x)|^2,  if the importance of the columns is known
                       sum over the block of |x - q_f(x)|^3                  otherwise

The square, weighted by the mean square of a column's inputs, is the error that is expected in the output. Without that
knowledge the square counts the largest weights too little: the published model of docs/accuracy-real.md loses more by
what it clips than it gains by finer steps, at four and at three bits.

The factor 1 is included and wins ties, so no block gets worse. For floats and codebooks wider ranges are tried as well:
their largest steps are coarse, and a range that puts the largest element below the largest code may fit better.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from bitport.algorithms.block_params import choose
from bitport.algorithms.pieces import by_matrix, joined, nearest, part_of, pieces
from bitport.numerics import Format, Params, block_scale, choose_qparams, to_blocks

NARROWER = tuple(f / 100 for f in range(98, 38, -2))
WIDER = tuple(f / 100 for f in range(105, 201, 5))


def search(x: Tensor, fmt: Format, importance: Tensor | None = None) -> Params:
    """``importance``: weights of the columns, [..., K]; None: all equal."""
    beside = () if importance is None else (importance.expand(*x.shape[:-2], x.shape[-1]),)
    return by_matrix(lambda matrix, *own: _matrix(matrix, fmt, *own), x, *beside)


def _matrix(x: Tensor, fmt: Format, importance: Tensor | None = None) -> Params:
    blocks, ends = to_blocks(x, fmt.block), _ends(x, fmt)
    pair, first = dataclasses.replace(fmt, block=(1, 2)), choose_qparams(x, fmt)
    factors = NARROWER if fmt.number.kind == "int" else (*NARROWER, *WIDER)
    ranges = [first, *(choose_qparams(ends * factor, pair, first.scale2) for factor in factors)]
    weights = None
    if importance is not None or blocks.numel() != x.numel():
        ones = x.new_ones(1, dtype=torch.float32) if importance is None else importance
        weights = to_blocks(ones.expand(x.shape), fmt.block)
    return joined(
        [
            _best(
                blocks[at].float(),
                fmt,
                [part_of(each, at) for each in ranges],
                None if weights is None else weights[at],
                3 if importance is None else 2,
            )
            for at in pieces(blocks)
        ]
    )


def _ends(x: Tensor, fmt: Format) -> Tensor:
    """[SN, 2 SK]: the smallest and largest element of each block, which determine its range."""
    blocks = to_blocks(x, fmt.block)
    return torch.stack([blocks.amin((-3, -1)), blocks.amax((-3, -1))], -1).flatten(-2)


def _best(x: Tensor, fmt: Format, ranges: list[Params], weights: Tensor | None, power: int) -> Params:
    best, least, unit = ranges[0], None, block_scale(ranges[0].scale, ranges[0].scale2)
    both = torch.empty_like(x), torch.empty_like(x)
    for tried in ranges:
        scale = block_scale(tried.scale, tried.scale2)
        units, values = nearest(x, fmt, scale, tried.zero, both)
        errors = values.sub_(units).abs_().pow_(power)
        loss = (errors if weights is None else errors.mul_(weights)).sum((-3, -1)) * (scale / unit) ** power
        if least is None:
            least = loss
            continue
        better = loss < least
        best, least = choose(better, tried, best), loss.where(better, least)
    return best
