"""Shared by AWQ and SmoothQuant: choose among several channel scales by the error that they lead to.

Multiplying the columns of a weight by s and dividing the input by s preserves the product but changes its rounding
error. Where x is large, a large s keeps the weight's columns precise; where w is large, a small s keeps them from
widening the range of the others. Candidates are x^alpha / w^beta for the magnitudes x and w of a channel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from bitport.numerics import Format

LIMIT = 2.0**10
"""Scales stay between 1 / LIMIT and LIMIT: norm weights in float16 must be able to hold the quotients."""
ROWS = 256
"""At most this many evenly spaced rows of each matrix are used: the errors of all rows say much the same about s."""


class Found(NamedTuple):
    """``scale`` [.., C]; the errors with it and without it, [..]."""

    scale: Tensor
    error: Tensor
    error_plain: Tensor

    def or_(self, scale: Tensor, error: Tensor) -> Found:
        """Take the given scale for each matrix where its error is smaller."""
        better = error < self.error
        return self._replace(
            scale=torch.where(better[..., None], scale, self.scale), error=torch.where(better, error, self.error)
        )

    @property
    def gain(self) -> float:
        """In dB, over all matrices; 0 if rounding changes nothing."""
        plain, error = self.error_plain.sum(), self.error.sum()
        return float(torch.where(plain == error, 0.0, 10 * torch.log10(plain / error)))


def best(candidates: Iterable[Tensor], error: Callable[[Tensor], Tensor], ones: Tensor) -> Found:
    """``error``: maps a scale [.., C] to one number [..] per matrix. The unscaled weight is a candidate too and wins
    ties."""
    plain = error(ones)
    found = Found(ones, plain, plain)
    for scale in candidates:
        found = found.or_(scale, error(scale))
    return found


def power(x: Tensor, alpha: float | Tensor, w: Tensor, beta: float | Tensor) -> Tensor:
    """x^alpha / w^beta, centred so that 1 / min = max; 1 for channels without input or weight."""
    dead = (x <= 0) | (w <= 0)
    raw = torch.where(dead, 1.0, x).log2() * alpha - torch.where(dead, 1.0, w).log2() * beta
    lives = ~dead
    high = torch.where(lives, raw, -torch.inf).amax(-1, keepdim=True)
    low = torch.where(lives, raw, torch.inf).amin(-1, keepdim=True)
    limit = math.log2(LIMIT)
    centred = (raw - (high + low) / 2).clamp(-limit, limit)
    return torch.where(dead, 0.0, centred).exp2()


def to_channels(values: Tensor, channels: Tensor, count: int) -> Tensor:
    """[.., K] to [.., count]: the mean over the inputs that come from the same channel."""
    total = values.new_zeros(*values.shape[:-1], count).index_add_(-1, channels, values)
    return total / (channels.numel() // count)


def few_rows(w: Tensor, fmt: Format) -> Tensor:
    """At most ROWS rows of w [.., N, K], if each row has its own blocks."""
    return evenly(w, ROWS) if fmt.block[0] == 1 else w


def evenly(x: Tensor, limit: int) -> Tensor:
    """At most ``limit`` rows of x [.., M, K], evenly spaced."""
    count = x.shape[-2]
    return x if count <= limit else x[..., torch.arange(limit, device=x.device) * count // limit, :]
