"""The exponent of growth, from made-up times; and a tiny run."""

from __future__ import annotations

import random
from typing import Any

import pytest

from bench import growth, products
from bench.suites import Shape

from .here import Here

Row = dict[str, Any]


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.5])
def test_an_exponent_is_found(exponent: float) -> None:
    slope, error = growth.fit([(size, 3 * size**exponent) for size in (1.0, 2.0, 4.0, 8.0)])
    assert slope == pytest.approx(exponent)
    assert error == pytest.approx(0, abs=1e-6)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    """400 fits to noisy lines: 95 % of the intervals contain 1, give or take four standard deviations of that count."""
    source, held = random.Random(0), 0
    for _ in range(400):
        slope, error = growth.fit([(2.0**at, 2.0**at * source.lognormvariate(0, 0.1)) for at in range(6)])
        held += abs(slope - 1) <= error
    assert abs(held - 380) <= 4 * (400 * 0.95 * 0.05) ** 0.5


@pytest.mark.parametrize("count", [2, len(growth.T95) + 3])
def test_too_few_or_many_points_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"not {count}"):
        growth.fit([(1.0 + at, 1.0) for at in range(count)])


def test_a_small_run_and_its_section(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "Flusher", lambda: lambda: None)
    monkeypatch.setattr(products, "Worker", Here)
    points = growth.measure((64, 128, 256), (1,), Shape(64, 64), (2, 4, 8), repetitions=3)
    names = {"torch bf16", "bitport int4", "bitport int8-dyn"}
    weights = [row for row in points if row["sweep"] == "weight, 1 rows"]
    assert {(row["candidate"], row["size"]) for row in weights} == {(n, s * s) for n in names for s in (64, 128, 256)}
    fitted = growth.fits(points)
    assert {(row["sweep"], row["candidate"]) for row in fitted} == {
        (sweep, name) for sweep in ("weight, 1 rows", "rows") for name in names
    }
    head: Row = {"run": "r1", "machine": {}, "commit": "abc"}
    text, charts = growth.section([head, *({"run": "r1", **row} for row in (*points, *fitted))], "charts")
    assert set(charts) == {"charts/growth-weight-1-rows.svg", "charts/growth-rows.svg"}
    assert all(name in text for name in charts)
    assert f"| rows | bitport int4 | {fitted[-2]['exponent']:.2f} ± {fitted[-2]['error']:.2f} |" in text
    assert growth.section([], "charts") == ("", {})
