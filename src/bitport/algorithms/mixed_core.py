"""Choose one option for each weight within a number of bytes: a multiple-choice knapsack.

    minimize    sum of errors    so that    sum of bytes <= budget

Solved by dynamic programming over bytes. The minimum of every weight is set aside; the rest is counted in units of the
greatest common divisor of all differences, which keeps the solution exact. If that takes more than ``STATES`` units,
the unit is enlarged and differences are rounded up to it: the budget still holds, and each weight wastes less than one
unit, a ``STATES``-th of the budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from bitport.errors import ArgumentError

STATES = 1 << 18
BROKEN = 1e100
"""The error of an option whose outputs are not finite: above all others, but below infinity, where nothing fits."""


class Option(NamedTuple):
    nbytes: int
    error: float


def choose(options: Sequence[Sequence[Option]], budget: int, states: int = STATES) -> list[int]:
    """Return the index of the chosen option for each weight."""
    least = [min(option.nbytes for option in each) for each in options]
    check_least(least, budget)
    left = budget - sum(least)
    extra = [[option.nbytes - low for option in each] for each, low in zip(options, least, strict=True)]
    unit = max(math.gcd(*(size for each in extra for size in each)), 1)
    unit = max(unit, math.ceil(min(left, sum(map(max, extra))) / states))
    sizes = [[math.ceil(size / unit) for size in each] for each in extra]
    room = min(left // unit, sum(map(max, sizes)))
    best = torch.zeros(room + 1, dtype=torch.float64, device="cpu")  # the least error within that many units
    taken: list[torch.Tensor] = []
    for each, size in zip(options, sizes, strict=True):
        tried = torch.full((len(each), room + 1), math.inf, dtype=torch.float64, device="cpu")
        for row, option, units in zip(tried, each, size, strict=True):
            if units <= room:
                row[units:] = best[: room + 1 - units] + (option.error if math.isfinite(option.error) else BROKEN)
        best, at = tried.min(0)
        taken.append(at.to(torch.uint8 if len(each) <= 256 else torch.int32))  # there is one for each unit: kept small
    chosen = []
    for at, size in zip(reversed(taken), reversed(sizes), strict=True):
        chosen.append(int(at[room]))
        room -= size[chosen[-1]]
    return chosen[::-1]


def check_least(least: Sequence[int], budget: int) -> None:
    if sum(least) > budget:
        raise ArgumentError(f"the smallest choice takes {sum(least)} bytes, more than the {budget} of the budget")
