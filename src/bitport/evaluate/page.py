"""HTML page of an evaluation: one model against its original, or several side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bitport.evaluate.columns import WORDS, columns, task_columns
from bitport.evaluate.directories import Evaluation, How
from bitport.evaluate.scatter import scatter
from bitport.integrations.lm_eval import Scores
from bitport.report import Report
from bitport.report.html import Html, code, document, rows, section, tiles
from bitport.report.layer_map import Scale
from bitport.report.page import error_map, errors, every_weight, footer, heading, left, sizes
from bitport.report.text import size

KL_NOTE = (
    "KL: how far the predictions of the next token are from the original's, in nats per token; 0 is no difference. "
    "Top-1: how often both find the same token most likely."
)

CHART_NOTE = "Further down is closer to the original, further left is smaller."


def page(models: Sequence[Evaluation], scores: Mapping[str, Scores], text: str, how: How, command: str) -> str:
    """Return the page. ``models``: the original first, or a single one; empty if only tasks were run. ``text``: name of
    the text's file."""
    names = [row.model for row in models] or list(scores)
    title = Path(names[-1]).name if len(names) <= 2 else "Comparison of models"
    below = f"against {names[0]}" if len(names) == 2 else f"{len(names)} models; the first: {names[0]}"
    others = models[1:]
    reports = [(row, row.layers) for row in others if row.layers is not None]
    body: list[Html] = [heading(title, below if len(names) > 1 else names[-1])]
    if models and len(models) <= 2:
        body.append(tiles(figures(models)))
    if models:
        body.append(section("Models", rows(*columns(models), WORDS), note=_what(models, text, how)))
    if len(others) > 1:
        points = [(Path(row.model).name, row.nbytes, row.divergence.kl if row.divergence else 0.0) for row in models]
        body.append(
            section(
                "Size and distance",
                scatter(points, "KL"),
                note=CHART_NOTE,
            )
        )
    if scores:
        body.append(section("Tasks", rows(*task_columns(scores), WORDS)))
    if len(reports) == 1:
        report = reports[0][1]
        body += [*sizes(report), *errors(report), *left(report)]
    elif reports:
        body += _maps(reports)
    body.append(section("How to do it again", code(command, "Command line")))
    body += [every_weight(report) for _, report in reports] if len(reports) == 1 else []
    return document(title, *body, footer())


def figures(models: Sequence[Evaluation]) -> list[tuple[str, str, str]]:
    row, first = models[-1], models[0]
    alone = row is first
    smaller = f"from {size(first.nbytes)}, {first.nbytes / row.nbytes:.2f} times smaller"
    found = [
        ("Size", size(row.nbytes), f"{row.bits_per_weight:.2f} bits per weight" if alone else smaller),
        (
            "Perplexity",
            f"{row.perplexity:.4f}",
            f"{row.scored} tokens" if alone else f"from {first.perplexity:.4f}, {row.change_percent:+.2f} %",
        ),
    ]
    if row.divergence:
        found += [
            ("KL divergence", f"{row.divergence.kl:.5f}", f"nats per token; 99 % below {row.divergence.kl_p99:.4f}"),
            ("Same first choice", f"{100 * row.divergence.top1:.2f} %", f"of {row.divergence.tokens} tokens"),
        ]
    return found


def _maps(reports: Sequence[tuple[Evaluation, Report]]) -> list[Html]:
    """Return one heat map per model, all with the same color scale."""
    output = any(layer.output_sqnr is not None for _, report in reports for layer in report.quantized)
    scale = Scale.of([layer for _, report in reports for layer in report.quantized], output)
    what = "outputs" if output else "weights"
    return [error_map(report, output, scale, f"{row.model}: error of {what}") for row, report in reports]


def _what(models: Sequence[Evaluation], text: str, how: How) -> str:
    note = KL_NOTE if any(row.divergence for row in models) else ""
    cache = f", keys and values in {how.kv_cache}" if how.kv_cache else ""
    return f"{models[0].scored} tokens of {text} scored in windows of {how.window}{cache}. {note}".rstrip()
