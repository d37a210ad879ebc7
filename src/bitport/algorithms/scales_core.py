"""What AWQ and SmoothQuant share: of several scales of the channels the one with the least error.

Columns of a weight times s, the input divided by s: the product stays, but what rounding does to it changes. Where
x is large, a large s keeps the weight's columns precise; where w is large, a small s keeps them from widening the range
of the others. Candidates are x^alpha / w^beta for sizes x and w of a channel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from bitport.numerics import Format

LIMIT = 2.0**10
"""Scales stay between 1 / LIMIT and LIMIT: norm weights in float16 must hold what is divided by them."""
ROWS = 256
"""Of each matrix at most so many rows, spread evenly, are looked at: errors of rows are alike in what they say of s."""


class Found(NamedTuple):
    """``scale`` [.., C]; the errors with it and without any, [..]."""

    scale: Tensor
    error: Tensor
    error_plain: Tensor

    def or_(self, scale: Tensor, error: Tensor) -> Found:
        """With what has the smaller error, for each matrix."""
        better = error < self.error
        return self._replace(
            scale=torch.where(better[..., None], scale, self.scale), error=torch.where(better, error, self.error)
        )

    @property
    def gain(self) -> float:
        """In dB, over all matrices; 0 where rounding changes nothing."""
        plain, error = self.error_plain.sum(), self.error.sum()
        return float(torch.where(plain == error, 0.0, 10 * torch.log10(plain / error)))


def best(candidates: Iterable[Tensor], error: Callable[[Tensor], Tensor], ones: Tensor) -> Found:
    """``error``: of a scale [.., C], one number [..] per matrix. No scale at all is among the candidates, and wins
    ties."""
    plain = error(ones)
    found = Found(ones, plain, plain)
    for scale in candidates:
        found = found.or_(scale, error(scale))
    return found


def power(x: Tensor, alpha: float | Tensor, w: Tensor, beta: float | Tensor) -> Tensor:
    """x^alpha / w^beta, its largest and smallest as far above 1 as below; 1 for channels without input or weight."""
    dead = (x <= 0) | (w <= 0)
    raw = torch.where(dead, 1.0, x).log2() * alpha - torch.where(dead, 1.0, w).log2() * beta
    lives = ~dead
    high = torch.where(lives, raw, -torch.inf).amax(-1, keepdim=True)
    low = torch.where(lives, raw, torch.inf).amin(-1, keepdim=True)
    limit = math.log2(LIMIT)
    centred = (raw - (high + low) / 2).clamp(-limit, limit)
    return torch.where(dead, 0.0, centred).exp2()


def to_channels(values: Tensor, channels: Tensor, count: int) -> Tensor:
    """[.., K] to [.., count]: the mean over the inputs that come from one channel."""
    total = values.new_zeros(*values.shape[:-1], count).index_add_(-1, channels, values)
    return total / (channels.numel() // count)


def few_rows(w: Tensor, fmt: Format) -> Tensor:
    """At most ROWS of the rows of w [.., N, K], where each row has blocks of its own."""
    n = w.shape[-2]
    if fmt.block[0] != 1 or n <= ROWS:
        return w
    return w.index_select(-2, torch.arange(ROWS, device=w.device) * n // ROWS)
