"""Histograms of input magnitudes, accumulated over batches, and the best range for each."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from bitport.numerics import ACTIVATIONS, static_scale

BINS = 2048
PARTS = torch.arange(100, 19, -1, dtype=torch.float64, device="cpu") / 100
"""Ranges to try, as shares of the largest magnitude, the full range first."""


class Magnitudes:
    """Counts of |x| in bins of equal width, starting at 0. When a larger value arrives, the bins are doubled in width
    by merging pairs, so that the counts depend on the values alone, not on their order."""

    def __init__(self, *_: object) -> None:
        self.peak: Tensor | None = None
        """The largest magnitude; None before any input."""
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
        """Merge, as if all inputs of ``other`` had been added here."""
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
        """The fixed scale [1, 1]. For integers, which are evenly spaced, the one with the least squared error, which
        may clip rare large values; for floats the one that covers the largest magnitude, since clipping gains
        nothing."""
        assert self.peak is not None
        number = ACTIVATIONS[act].number
        if number.kind != "int" or not self.width:
            return static_scale(self.peak, act)
        value = (torch.arange(BINS, dtype=torch.float64, device="cpu") + 0.5) * self.width
        step = PARTS[:, None] * self.peak.double() / number.max
        rounded = (value / step).round().clamp(max=number.max) * step
        error = ((rounded - value).square() * self.counts).sum(1)
        return static_scale(self.peak * PARTS[error.argmin()].float(), act)
