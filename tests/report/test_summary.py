"""What ``bitport quantize`` prints when it is done, and a notebook shows of a report."""

from __future__ import annotations

import dataclasses

from bitport.report import LayerReport, Report

TABLE = LayerReport("embed.weight", "int8", "rule", 4000, 2000)
HEAD = LayerReport("head.weight", "int8", "rule", 4000, 2000, tied=True)


def row(report: Report, at: int) -> str:
    return " ".join(report.summary().splitlines()[2 + at].split())


def test_the_size_of_tied_weights_counts_once() -> None:
    assert row(Report((TABLE, HEAD), 4000, 2000), 0) == "int8 1 + 1 tied 4.0 kB -> 2.0 kB"


def test_a_line_of_second_names_alone_has_no_size() -> None:
    left = dataclasses.replace(HEAD, scheme=None, reason="because")
    assert row(Report((TABLE, left), 4000, 2000), 1) == "- 1 tied because"
