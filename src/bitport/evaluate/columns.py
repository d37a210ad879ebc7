"""Results of evaluated models as columns of text, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bitport.evaluate.directories import Evaluation
from bitport.integrations.lm_eval import Scores
from bitport.report import LayerReport
from bitport.report.text import size

WORDS = ("model", "schemes", "task", "metric")
"""Columns of text, not numbers."""


def columns(models: Sequence[Evaluation]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return (header, one row per model), without empty columns."""
    apart = [row.divergence for row in models]
    found = {
        "model": [row.model for row in models],
        "schemes": [", ".join(row.schemes) or "-" for row in models],
        "size": [size(row.nbytes) for row in models],
        "bits/weight": [f"{row.bits_per_weight:.2f}" for row in models],
        "perplexity": [f"{row.perplexity:.4f}" for row in models],
        "change": ["" if at == 0 else f"{row.change_percent:+.2f} %" for at, row in enumerate(models)],
        "KL": [f"{each.kl:.5f}" if each else "" for each in apart],
        "KL 99 %": [f"{each.kl_p99:.5f}" if each else "" for each in apart],
        "top-1": [f"{100 * each.top1:.2f} %" if each else "" for each in apart],
        "tokens/s": [f"{row.tokens_per_second:.0f}" if row.tokens_per_second else "" for row in models],
    }
    kept = {name: cells for name, cells in found.items() if any(cells)}
    return list(kept), list(zip(*kept.values(), strict=True))


def task_columns(scores: Mapping[str, Scores]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return (header, rows): one row per metric of each task, one column per model."""
    first = next(iter(scores.values()))
    pairs = [(task, metric) for task, metrics in first.items() for metric in metrics]
    cells = [(*pair, *(_score(each, *pair) for each in scores.values())) for pair in pairs]
    return ["task", "metric", *scores], cells


def _score(scores: Scores, task: str, metric: str) -> str:
    return f"{scores[task][metric]:.4f}" if metric in scores.get(task, {}) else "-"


def lowest(row: Evaluation, count: int = 5) -> list[LayerReport]:
    """The ``count`` quantized layers with the largest error, of the output if measured, else of the weight."""

    def error(layer: LayerReport) -> float:
        found = layer.sqnr if layer.output_sqnr is None else layer.output_sqnr
        return float("inf") if found is None else found

    compared = [layer for layer in row.layers.quantized if layer.sqnr is not None] if row.layers else []
    return sorted(compared, key=error)[:count]
