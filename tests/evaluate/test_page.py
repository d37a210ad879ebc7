"""Pages of evaluations: everything compared is shown; the chart's axes."""

from __future__ import annotations

import pytest

from bitport.evaluate.directories import Evaluation, How
from bitport.evaluate.divergence import Divergence
from bitport.evaluate.page import page
from bitport.evaluate.scatter import scatter, ticks
from bitport.report import LayerReport, Report

from ..report.hostile import NAMES
from ..report.test_page import read

LAYERS = Report((LayerReport("layers.0.up.weight", "int4", "as in the checkpoint", 100, 30, 20.0),), 120, 50)


def row(name: str, *, apart: float | None = None, layers: Report | None = None) -> Evaluation:
    away = None if apart is None else Divergence(apart, 9 * apart, 20 * apart, 0.875, 64)
    return Evaluation(name, ("int4",), 50, 4.5, 3.25, 1.5, away, None, 64, 0.1, layers)


def words(*models: Evaluation, scores: dict[str, dict[str, dict[str, float]]] | None = None) -> str:
    return "\n".join(read(page(models, scores or {}, "some.txt", How(), "bitport eval")).words)


def test_one_model_against_another() -> None:
    shown = words(row("a/first"), row("b/second", apart=0.0123, layers=LAYERS))
    for figure in (
        "second",
        "a/first",
        "0.01230",
        "99 % below 0.1107",
        "87.50 %",
        "layers.0.up.weight",
        "bitport eval",
    ):
        assert figure in shown


def test_several_models_share_a_scale() -> None:
    better = Report((LayerReport("layers.0.up.weight", "int8", "as in the checkpoint", 100, 60, 44.0),), 120, 80)
    shown = words(row("a"), row("b", apart=0.02, layers=LAYERS), row("c", apart=0.01, layers=better))
    assert "Comparison of models" in shown
    assert shown.count("20.0 dB") >= 2, "both legends go from the worst to the best of all"
    assert shown.count("44.0 dB: closer") == 2


def test_divergence_is_explained_where_it_is_shown() -> None:
    assert "KL: how far" in words(row("a"), row("b", apart=0.02))
    assert "KL: how far" not in words(row("a"))


def test_tasks_alone() -> None:
    shown = words(scores={"a": {"arc": {"acc": 0.5}}, "b": {"arc": {"acc": 0.25}}})
    assert "0.5000" in shown
    assert "Models" not in shown


def test_names_of_directories_are_text() -> None:
    models = [row(name, apart=0.1) for name in NAMES[:3]]
    assert all(name in words(*models) for name in NAMES[:3])


@pytest.mark.parametrize("high", [0.0007, 0.012, 1.0, 4.4, 5_700_000_000.0])
def test_ticks_are_round_and_few(high: float) -> None:
    made = ticks(high)
    assert 2 <= len(made) <= 6
    assert made[0] == 0
    assert made[-1] <= high < made[-1] + made[1] * 1.0001


def test_a_point_that_is_half_as_far_is_half_as_high() -> None:
    drawing = scatter([("a", 100, 0.0), ("b", 50, 1.0), ("c", 25, 2.0)], "KL")
    heights = [float(part.split('"')[0]) for part in drawing.split('cy="')[1:]]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.02)
