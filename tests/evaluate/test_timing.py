"""Candidates alternate, and ratios are taken within a repetition."""

from __future__ import annotations

import torch

from bitport.evaluate import timing


def test_ratios_are_taken_within_a_repetition() -> None:
    """A machine that becomes half as fast during a run changes the medians, but not the ratio."""
    times = {"a": [3.0, 6.0, 6.0], "b": [1.0, 2.0, 2.0]}
    assert timing.ratio(times, "a", "b") == 3.0
    assert timing.medians(times) == {"a": 6.0, "b": 2.0}


def test_candidates_take_turns() -> None:
    order: list[str] = []
    times = timing.interleaved(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repetitions=3, seconds=0
    )
    assert {name: len(each) for name, each in times.items()} == {"a": 3, "b": 3}
    assert "".join(order[-6:]) == "ababab"


def test_noise_is_half_of_the_middle_half() -> None:
    assert timing.spread([1.0, 2.0, 3.0, 4.0, 5.0]) == (4.0 - 2.0) / 2 / 3.0
    assert timing.spread([2.0, 2.0, 2.0, 9.0, 2.0]) == 0.0, "one outlier is no noise"


def test_the_clock_of_the_cpu_does_not_wait() -> None:
    clock = timing.clock_of(torch.device("cpu"))
    assert clock() <= clock()
