"""Weights with every edge case of rounding, and their parts compared by bits."""

from __future__ import annotations

import torch
from torch import Tensor

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def weight(n: int, k: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Rows of all magnitudes, ties, and edge cases in the first rows: zeros of both signs, the largest and smallest
    numbers, one sign only, infinities, NaN."""
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(n, k, generator=made) * torch.exp2(torch.randint(-12, 8, (n, 1), generator=made).float())
    end = torch.finfo(dtype)
    x[n // 2 :: 3] = (x[n // 2 :: 3] * 8).round() / 8
    special = (0.0, -0.0, end.max, -end.max, end.smallest_normal, end.tiny * end.eps, float("inf"), float("nan"))
    for row, value in enumerate(special[: n - 1]):
        x[row, :: 1 + row % 3] = value
    if n > 12:
        x[8], x[9] = x[8].abs(), -x[9].abs()
        x[10] *= end.smallest_normal
        x[11] = end.max * torch.linspace(-1, 1, k)
        x[12, k // 2] = float("-inf")
    return x.to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    nans = a.float().isnan()
    bits = [part.view(BITS[part.itemsize]) for part in (a, b)]
    return torch.equal(nans, b.float().isnan()) and torch.equal(bits[0][~nans], bits[1][~nans])
