"""A matrix with fixed scales, rounded one column at a time. It is stored transposed, so that each column is
contiguous."""

from __future__ import annotations

import torch
from torch import Tensor

from bitport.algorithms.pieces import nearest_number
from bitport.numerics import Format, Params, block_scale, expand


class Columns:
    """``order``: the order of the columns [K]; None: unchanged. Columns of one block share a row of ``scale`` and
    ``zero``, [SK, N]."""

    def __init__(self, fmt: Format, params: Params, n: int, k: int, order: Tensor | None = None) -> None:
        self.fmt = fmt
        self.block = [at // fmt.block_shape(n, k)[1] for at in (range(k) if order is None else order.tolist())]
        self.scale = _by_row(block_scale(params.scale, params.scale2), fmt, n)
        self.steps = self.scale.where(self.scale != 0, torch.inf)  # a block of zeros may have a scale of 0
        self.zero = None if params.zero is None else _by_row(params.zero.float(), fmt, n)

    def rounded(self, x: Tensor, at: int) -> Tensor:
        """The values nearest to x [N] as column ``at``: those of the codes that :func:`quantize_codes` gives."""
        block = self.block[at]
        units = x / self.steps[block]
        offset = self.fmt.number.midpoint if self.zero is None else self.zero[block]
        return nearest_number(units, self.fmt, offset, out=units).mul_(self.scale[block])


def _by_row(part: Tensor, fmt: Format, n: int) -> Tensor:
    return expand(part, (fmt.block[0], 1), n, part.shape[-1]).t().contiguous()
