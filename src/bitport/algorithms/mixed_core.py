"""The best choice of one option for each weight within a number of bytes: a knapsack with one item of each kind.

    minimize    sum of errors    so that    sum of bytes <= budget

by dynamic programming over bytes. What every weight takes at least is set aside; the rest is counted in the greatest
common divisor of all differences, which makes the solution exact. Where that would be more than ``STATES`` units, a
unit is so much larger and differences are rounded up to it: then the budget still holds, and what is lost is less than
one unit, of ``STATES`` in the budget, for each weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from bitport.errors import ArgumentError

STATES = 1 << 18
BROKEN = 1e100
"""The error of an option whose outputs are no numbers: more than all others, and still less than none that fits."""


class Option(NamedTuple):
    nbytes: int
    error: float


def choose(options: Sequence[Sequence[Option]], budget: int, states: int = STATES) -> list[int]:
    """For each weight the index of one of its options."""
    least = [min(option.nbytes for option in each) for each in options]
    check_least(least, budget)
    left = budget - sum(least)
    extra = [[option.nbytes - low for option in each] for each, low in zip(options, least, strict=True)]
    left = min(left, sum(max(each) for each in extra))
    unit = max(math.gcd(*(size for each in extra for size in each)), 1)
    unit = max(unit, math.ceil(left / states))
    sizes = [[math.ceil(size / unit) for size in each] for each in extra]
    room = left // unit
    best = torch.zeros(room + 1, dtype=torch.float64, device="cpu")  # the least error within so many units
    taken: list[torch.Tensor] = []
    for each, size in zip(options, sizes, strict=True):
        tried = torch.full((len(each), room + 1), math.inf, dtype=torch.float64, device="cpu")
        for row, option, units in zip(tried, each, size, strict=True):
            if units <= room:
                row[units:] = best[: room + 1 - units] + (option.error if math.isfinite(option.error) else BROKEN)
        best, at = tried.min(0)
        taken.append(at.to(torch.uint8))
    chosen = []
    for at, size in zip(reversed(taken), reversed(sizes), strict=True):
        chosen.append(int(at[room]))
        room -= size[chosen[-1]]
    return chosen[::-1]


def check_least(least: Sequence[int], budget: int) -> None:
    if sum(least) > budget:
        raise ArgumentError(f"the smallest choice takes {sum(least)} bytes, more than the {budget} of the budget")
