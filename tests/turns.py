"""Which parameters are for the fast tests and which for the slow ones (make test-slow)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def slow(*cases: Any) -> list[Any]:
    """Parameters for slow tests alone; a tuple is the values of several."""
    return [pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=pytest.mark.slow) for each in cases]


EVERY = pytest.mark.parametrize("every", [False, *slow(True)], ids=["", "every combination"])
"""For a test that runs files of tests in a process of their own: all of theirs in the slow one."""


def turns(*axes: Iterable[Any]) -> list[Any]:
    """All combinations of the axes' values; a tuple is the values of several parameters. Fast are those where the axes
    take their values in turn, as often as the longest has some; every further axis also skips one more value per
    round, so that not always the same meet."""
    lists = [[value if isinstance(value, tuple) else (value,) for value in axis] for axis in axes]
    fast = {
        tuple((turn + order * (turn // len(values))) % len(values) for order, values in enumerate(lists))
        for turn in range(max(map(len, lists)))
    }
    every = []
    for places in itertools.product(*(range(len(values)) for values in lists)):
        chosen = [each for values, place in zip(lists, places, strict=True) for each in values[place]]
        name = "-".join(str(each).removeprefix("torch.") for each in chosen)
        every.append(pytest.param(*chosen, id=name, marks=() if places in fast else pytest.mark.slow))
    return every
