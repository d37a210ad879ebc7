"""A matrix under fixed scales, rounded one column at a time."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from bitport.algorithms.parts import Params
from bitport.numerics import Format, block_scale, dequantize_codes, expand, quantize_codes


class Columns:
    """``order``: of the columns [K]; None: as they lie. The scale with its global one in it would be rounded twice, so
    that stays apart."""

    def __init__(self, fmt: Format, params: Params, n: int, k: int, order: Tensor | None = None) -> None:
        self.cell, self.scale2 = dataclasses.replace(fmt, block=(1, 1)), params.scale2
        self.scale = expand(block_scale(params.scale), fmt.block, n, k)
        self.zero = None if params.zero is None else expand(params.zero, fmt.block, n, k)
        if order is not None:
            self.scale = self.scale[:, order]
            self.zero = None if self.zero is None else self.zero[:, order]

    def rounded(self, x: Tensor, at: int) -> tuple[Tensor, Tensor]:
        """Codes and values [N, 1] of x [N, 1] as column ``at``."""
        here = slice(at, at + 1)
        params = Params(self.scale[:, here], None if self.zero is None else self.zero[:, here], self.scale2)
        codes = quantize_codes(x, self.cell, *params)
        return codes, dequantize_codes(codes, self.cell, *params)
