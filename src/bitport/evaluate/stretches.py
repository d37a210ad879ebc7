"""Figures of a model along a text, kept for stretches of it, so that models can be compared with a standard error.

What makes a stretch hard is hard for every model, so two models are compared by their differences on the same
stretches. Tokens next to each other are not independent: the standard error takes stretches, not tokens, to be so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from torch import Tensor

from bitport.errors import ArgumentError

STRETCH = 73
"""Scored tokens in a stretch: a seventh of a window of 512, whose first token is not scored."""


@dataclasses.dataclass(frozen=True)
class Stretches:
    """Means over each stretch."""

    nll: tuple[float, ...]
    """Negative log likelihood of a token, in nats."""
    kl: tuple[float, ...]
    """KL divergence from the original, in nats per token."""
    top1: tuple[float, ...]
    """Top-1 agreement with the original, as a fraction of the tokens."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    mean: float
    error: float
    """The standard error of the mean."""


def by_stretches(values: Tensor) -> tuple[float, ...]:
    """Return the mean over each stretch of ``values``, one for each scored token, with six digits."""
    if values.numel() % STRETCH:
        raise ArgumentError(
            f"{values.numel()} scored tokens are no multiple of {STRETCH}: take whole windows, in which a multiple of "
            f"{STRETCH} tokens is scored"
        )
    return tuple(float(f"{mean:.6g}") for mean in values.double().view(-1, STRETCH).mean(1).tolist())


def estimate(values: Sequence[float], against: Sequence[float] | None = None) -> Estimate:
    """The mean of ``values``, or of their differences from those of another model, ``against``."""
    other = [0.0] * len(values) if against is None else against
    differences = [mine - theirs for mine, theirs in zip(values, other, strict=True)]
    mean = math.fsum(differences) / len(differences)
    variance = math.fsum((each - mean) ** 2 for each in differences) / (len(differences) - 1)
    return Estimate(mean, math.sqrt(variance / len(differences)))
