"""A matrix with fixed scales, rounded one column at a time. It is stored transposed, so that each column is
contiguous."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from bitport.numerics import Format, Params, block_scale, dequantize_codes, expand, quantize_codes
from bitport.numerics.codec import has_whole_zero


class Columns:
    """``order``: the order of the columns [K]; None: unchanged. The global scale is kept separate, because multiplying
    it into the block scales would round twice."""

    def __init__(self, fmt: Format, params: Params, n: int, k: int, order: Tensor | None = None) -> None:
        self.fmt, self.cell, self.scale2 = fmt, dataclasses.replace(fmt, block=(1, 1)), params.scale2
        self.scale = _columns(block_scale(params.scale), fmt, n, k, order)
        self.zero = None if params.zero is None else _columns(params.zero, fmt, n, k, order)
        if self.zero is not None and fmt.zero == "int":
            self.zero = self.zero.float()
        self.whole = has_whole_zero(fmt)

    def rounded(self, x: Tensor, at: int) -> tuple[Tensor, Tensor]:
        """Round x [N] as column ``at``; returns its codes and values [N]."""
        zero = None if self.zero is None else self.zero[at]
        if self.whole:  # same result as below, in fewer operations
            offset = self.fmt.number.midpoint if zero is None else zero
            scale = self.scale[at]
            codes = (x / scale).round_().add_(offset).clamp_(0, self.fmt.number.qmax)
            return codes.to(torch.uint8), (codes - offset) * scale
        params = Params(self.scale[at][:, None], None if zero is None else zero[:, None], self.scale2)
        codes = quantize_codes(x[:, None], self.cell, *params)
        return codes[:, 0], dequantize_codes(codes, self.cell, *params)[:, 0]


def _columns(part: Tensor, fmt: Format, n: int, k: int, order: Tensor | None) -> Tensor:
    each = expand(part, fmt.block, n, k).t()
    return each.contiguous() if order is None else each[order].contiguous()
