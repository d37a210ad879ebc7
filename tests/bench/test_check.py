"""The check that nothing is slower than bf16: its notion of noise, and a tiny run in real processes."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from bench import check, products
from bench.products import Candidate
from bench.suites import Shape

from .here import Here

Row = dict[str, Any]
POINT = {"k": 4096, "n": 4096, "rows": 64, "variant": "int4", "note": "native"}
BAD = {**POINT, **check.judged([0.9] * 25)}
GOOD = {**POINT, "rows": 1, **check.judged([2.0, 3.0, 4.0])}
FAILED = {"k": 8, "n": 8, "rows": None, "variant": "int8", "reason": "it crashed"}


@pytest.mark.parametrize("pairs", [11, 16, 25])
def test_fair_coins_seldom_fail(pairs: int) -> None:
    def chance(count: int) -> float:
        return sum(math.comb(pairs, each) for each in range(count, pairs + 1)) / 2**pairs

    assert chance(check.needed(pairs)) <= check.CHANCE < chance(check.needed(pairs) - 1)


@pytest.mark.parametrize("pairs", [0, check.LEAST, check.FIRST])
def test_the_first_pairs_prove_nothing(pairs: int) -> None:
    assert check.needed(pairs) > pairs
    assert check.needed(check.LEAST_MORE) <= check.LEAST_MORE, "but those of a second look can"


@pytest.mark.parametrize(
    ("true", "noise", "bad"),
    [(1.0, 0.2, False), (0.99, 0.2, False), (0.9, 0.02, True), (1.1, 0.3, False)],
    ids=["level", "within noise", "slower", "faster"],
)
def test_slower_means_beyond_the_noise(true: float, noise: float, bad: bool) -> None:
    """The noise is one-sided, as on a real machine: occasionally a turn is disturbed and takes three times as long."""
    source = random.Random(0)

    def turn(seconds: float) -> float:
        return seconds * (1 + noise * source.random()) * (3 if source.random() < 0.1 else 1)

    ratios = [turn(1.0) / turn(1 / true) for _ in range(check.MORE)]
    assert check.slower({**POINT, **check.judged(ratios)}) is bad


def test_a_point_without_result_fails_and_is_named() -> None:
    assert check.slower(FAILED)
    assert "it crashed" in check.told([FAILED])


def test_failures_come_first_then_the_worst() -> None:
    odd = {**POINT, "rows": 4, **check.judged([0.8, 0.9, 1.2])}
    rows = check.worst_first([GOOD, odd, BAD])
    assert [each["rows"] for each in rows] == [64, 4, 1]
    told = check.told(rows)
    assert told.splitlines()[2].split()[:3] == ["4096x4096", "64", "int4"]
    assert "25 of 25" in told, "what a record holds counts, not what is usual"
    assert "1 of 3 points are slower" in told
    assert "all 2 points" in check.told(rows[1:])


def test_every_failure_is_printed() -> None:
    told = check.told([{**BAD, "rows": 1000 + at} for at in range(check.WORST + 5)])
    assert f" {1000 + check.WORST + 4} " in told


def test_the_newest_recorded_run_counts() -> None:
    def run(name: str, base: str, isa: str = "") -> list[Row]:
        return [{"run": name, "machine": {}, "isa": isa, "base": base}, {**GOOD, "run": name}]

    lines = [*run("r1", "bf16"), *run("r2", "bf16"), *run("r3", "bf16 prepacked"), *run("r4", "bf16", "avx2")]
    assert [each["run"] for each in check.recorded(lines, "", "bf16")] == ["r2"]
    assert [each["run"] for each in check.recorded(lines, "avx2", "bf16")] == ["r4"]
    assert check.recorded(lines, "avx2", "bf16 prepacked") == []


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> products.Chosen:
    monkeypatch.setattr(check, "Flusher", lambda: lambda: None)
    return products.Chosen((Shape(256, 48),), (1, 4), ("int4",), ("torch", "bitport"), 3, 1, "")


@pytest.mark.parametrize("base", [Candidate("torch", "bf16"), check.COMPILED], ids=["eager", "frozen"])
def test_a_small_run(chosen: products.Chosen, base: Candidate) -> None:
    if base == check.COMPILED and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        with pytest.raises(SystemExit, match=r"nothing to compare with: .*oneDNN has no bfloat16"):
            check.measure(chosen, base)
        return
    rows = check.measure(chosen, base)
    assert [(row["k"], row["n"], row["rows"], row["variant"]) for row in rows] == [
        (256, 48, 1, "int4"),
        (256, 48, 4, "int4"),
    ]
    for row in rows:
        assert row["low"] <= row["speedup"] <= row["high"]
        looked_again = row["pairs"] >= check.LEAST_MORE
        assert looked_again or (row["pairs"] == check.FIRST and row["speedup"] >= 1)


def test_what_looks_slow_is_measured_again(chosen: products.Chosen, monkeypatch: pytest.MonkeyPatch) -> None:
    """In alternating order, so that going first is no advantage."""
    monkeypatch.setattr(products, "Worker", Here)
    asked: list[str] = []

    def turn(self: check.Turns, candidate: Candidate, m: int, fact: Row) -> float:
        asked.append(candidate.peer)
        return 1.0 if candidate.peer == "torch" else 2.0

    monkeypatch.setattr(check.Turns, "__call__", turn)
    (row, _) = check.measure(chosen, Candidate("torch", "bf16"))
    assert row["speedup"] == 0.5
    assert row["pairs"] == row["below"] == check.MORE
    assert check.slower(row)
    second = asked[2 * check.FIRST : 2 * check.FIRST + 2 * check.MORE]
    assert second[:4] == ["bitport", "torch", "torch", "bitport"]
