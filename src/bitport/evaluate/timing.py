"""Interleaved timing: absolute times drift with the machine, so candidates take turns.

One repetition times each candidate once. Results are medians over repetitions, and ratios of times within a repetition.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Clock = Callable[[], float]


def interleaved(
    candidates: dict[str, Callable[[], Any]],
    *,
    repetitions: int = 21,
    seconds: float = 0.004,
    clock: Clock = time.perf_counter,
) -> dict[str, list[float]]:
    """Return seconds per call of each candidate, one entry per repetition, which calls each for about ``seconds``.
    Single-threaded candidates may be timed with ``time.thread_time``, which excludes time taken by other processes."""
    calls = {name: _calls_in(run, seconds, clock) for name, run in candidates.items()}
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repetitions):
        for name, run in candidates.items():
            times[name].append(_time(run, calls[name], clock))
    return times


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(each) for name, each in times.items()}


def ratio(times: dict[str, list[float]], name: str, base: str) -> float:
    """Return the median over repetitions of name's time divided by base's in the same repetition."""
    return statistics.median(mine / theirs for mine, theirs in zip(times[name], times[base], strict=True))


def spread(ratios: Sequence[float]) -> float:
    """Return half the interquartile range relative to the median: the noise of a ratio. NaN for fewer than two
    ratios."""
    if len(ratios) < 2:
        return math.nan
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return (high - low) / 2 / middle


def clock_of(device: torch.device) -> Clock:
    """Return a clock that first waits for all work on ``device``."""
    if device.type == "cpu":
        return time.perf_counter

    def clock() -> float:
        torch.accelerator.synchronize(device)
        return time.perf_counter()

    return clock


def _calls_in(run: Callable[[], Any], seconds: float, clock: Clock) -> int:
    run()
    calls = 1
    while (took := _time(run, calls, clock)) < seconds / 4 / calls and calls < 1 << 20:
        calls *= 2
    return max(1, int(seconds / max(took, 1e-9)))


def _time(run: Callable[[], Any], calls: int, clock: Clock) -> float:
    start = clock()
    for _ in range(calls):
        run()
    return (clock() - start) / calls
