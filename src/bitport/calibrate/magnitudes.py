"""How large the inputs of a weight are: a histogram that many batches go into, and the range that is best for it."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from bitport.numerics import ACTIVATIONS, static_scale

BINS = 2048
PARTS = torch.arange(100, 19, -1, dtype=torch.float64, device="cpu") / 100
"""Of the largest magnitude: the ranges that are tried, the whole one first."""


class Magnitudes:
    """Counts of |x| in bins of one width from 0 on. Where something larger comes, the bins become twice as wide, two by
    two, so that the counts depend on the numbers alone, not on their order."""

    def __init__(self, *_: object) -> None:
        self.peak: Tensor | None = None
        """The largest of all; None before anything came."""
        self.width = 0.0
        self.counts = torch.zeros(BINS, dtype=torch.int64, device="cpu")

    def add(self, x: Tensor, index: tuple[int, ...] = ()) -> None:
        if not x.numel():
            return
        x = x.detach().abs().float()
        most = x.amax().cpu()
        self.peak = most if self.peak is None else torch.maximum(self.peak, most)
        if not 0 < float(most) < float("inf"):
            return
        self._widen(max(2.0 ** float(torch.frexp(most).exponent) / BINS, torch.finfo(torch.float32).tiny))
        self.counts = self.counts + torch.histc(x / self.width, BINS, 0, BINS).to(torch.int64).cpu()

    def __iadd__(self, other: Magnitudes) -> Magnitudes:
        """As if all that came to ``other`` had come here."""
        if other.peak is not None:
            self.peak = other.peak if self.peak is None else torch.maximum(self.peak, other.peak)
        if other.width:
            self._widen(other.width)
            alike = copy.copy(other)
            alike._widen(self.width)
            self.counts += alike.counts
        return self

    def _widen(self, width: float) -> None:
        self.width = self.width or width
        while self.width < width:
            self.counts = torch.cat([self.counts.view(-1, 2).sum(1), self.counts.new_zeros(BINS // 2)])
            self.width *= 2

    def scale(self, act: str) -> Tensor:
        """The fixed scale [1, 1]. Of integers, whose steps are all alike, that with the least squared error: what is
        rare and large may be cut. Of floats that which takes in the largest magnitude, since cutting gains nothing."""
        assert self.peak is not None
        number = ACTIVATIONS[act].number
        if number.kind != "int" or not self.width:
            return static_scale(self.peak, act)
        value = (torch.arange(BINS, dtype=torch.float64, device="cpu") + 0.5) * self.width
        step = PARTS[:, None] * self.peak.double() / number.max
        rounded = (value / step).round().clamp(max=number.max) * step
        error = ((rounded - value).square() * self.counts).sum(1)
        return static_scale(self.peak * PARTS[error.argmin()].float(), act)
