"""Clipping search: of several ranges per block the one with the least squared error.

Rounding to nearest takes the widest range, so that nothing clips; a narrower one has finer steps, and where few
elements are large their loss is less than what all others gain. For each block, over factors f of its range:

    minimize over f    sum over the block of importance_k * (x - q_f(x))^2

The factor 1 is among them and wins ties: no block gets worse. Floats and codebooks try wider ranges too: their largest
steps are coarse, and a range that puts the largest element below the largest code may lie better.
"""

from __future__ import annotations

from torch import Tensor

from bitport.algorithms.parts import Params, block_sum, choose, rounded
from bitport.numerics import Format, choose_qparams

NARROWER = tuple(f / 100 for f in range(98, 38, -2))
WIDER = tuple(f / 100 for f in range(105, 201, 5))


def search(x: Tensor, fmt: Format, importance: Tensor | None = None) -> Params:
    """``importance``: of each column, [..., K]; None: all alike."""
    best = Params(*choose_qparams(x, fmt))
    least = _loss(x, fmt, best, importance)
    for factor in NARROWER if fmt.number.kind == "int" else (*NARROWER, *WIDER):
        tried = Params(*choose_qparams(x * factor, fmt, best.scale2))
        loss = _loss(x, fmt, tried, importance)
        better = loss < least
        best, least = choose(better, tried, best), loss.where(better, least)
    return best


def _loss(x: Tensor, fmt: Format, params: Params, importance: Tensor | None) -> Tensor:
    error = (x.float() - rounded(x, fmt, params)).square()
    return block_sum(error if importance is None else error * importance[..., None, :], fmt)
