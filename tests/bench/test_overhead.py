"""The cost of bitport's way to a kernel stays near what it was: a bound far above it, against regressions only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import measure
from bench.overhead import MODES, dispatch

BOUND = {"grad": 4.0, "no_grad": 3.5, "inference": 3.5}
"""Times nn.Linear's own call. The aim is 2.5; best of three runs, since a busy machine disturbs both."""


def test_dispatch_is_cheap() -> None:
    runs = [dispatch(repetitions=31) for _ in range(3)]
    best = {(row["name"], row["mode"]): min(run[at]["ratio"] for run in runs) for at, row in enumerate(runs[0])}
    assert {mode for _, mode in best} == set(MODES)
    assert {key: ratio for key, ratio in best.items() if ratio > BOUND[key[1]]} == {}


def test_ratios_are_taken_within_a_repetition() -> None:
    """A machine that slows down by half during a run changes the medians, not the ratio."""
    times = {"a": [3.0, 6.0, 6.0], "b": [1.0, 2.0, 2.0]}
    assert measure.ratio(times, "a", "b") == 3.0
    assert measure.medians(times) == {"a": 6.0, "b": 2.0}


def test_candidates_take_turns() -> None:
    order: list[str] = []
    times = measure.interleaved(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repetitions=3, seconds=0
    )
    assert {name: len(each) for name, each in times.items()} == {"a": 3, "b": 3}
    assert "".join(order[-6:]) == "ababab"


def test_records_are_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    for value in (1, 2):
        path = measure.record("suite", [{"value": value}])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["value"] for row in rows] == [1, 2]
    assert rows[0]["machine"].keys() == {"cpu", "cores", "threads", "system", "capability", "python", "torch"}
