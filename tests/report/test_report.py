"""Reports: data first (JSON both complete and exact), text second; progress is shown only on a terminal."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import nn

import bitport
from bitport.report import LayerReport, Report
from bitport.report.progress import progress
from bitport.report.text import duration, size, table

ROWS = (
    LayerReport("a.weight", "int4", "rule '*'", 2_000_000, 531_250, 23.456),
    LayerReport("b.weight", None, "rule 'b' says skip", 999, 999),
)


def test_report() -> None:
    report = Report(ROWS, 2_000_999, 532_249)
    assert report.quantized == ROWS[:1]
    assert report.skipped == ROWS[1:]
    assert json.loads(report.to_json()) == dataclasses.asdict(report) | {
        "layers": [dataclasses.asdict(row) for row in ROWS]
    }
    assert str(report).splitlines() == [
        "weight    scheme  size                SQNR     why",
        "--------  ------  ------------------  -------  ------------------",
        "a.weight  int4    2.0 MB -> 531.2 kB  23.5 dB  rule '*'",
        "b.weight  -       999 B                        rule 'b' says skip",
        "1 weight quantized, 1 left; 2.0 MB -> 532.2 kB",
    ]


def test_a_tied_weight_is_one_weight() -> None:
    again = [dataclasses.replace(row, name=f"again.{row.name}", tied=True) for row in ROWS]
    lines = str(Report((*ROWS, *again), 2_000_999, 532_249)).splitlines()
    assert [" (tied) " in line for line in lines] == [False] * 4 + [True] * 2 + [False]
    assert lines[-1] == "1 weight quantized, 1 left; 2.0 MB -> 532.2 kB"


def test_json_is_json_where_an_error_is_infinite() -> None:
    """A weight that its scheme holds exactly has an infinite SQNR, which JSON cannot represent."""
    model = nn.Linear(32, 8)
    with torch.no_grad():
        model.weight.fill_(1.0)
    report = bitport.quantize_(model, "int8")
    assert report.layers[0].sqnr == float("inf")
    json.loads(report.to_json(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_960, "1.0 MB"),
        (1_234_567, "1.2 MB"),
        (5 * 10**9, "5.0 GB"),
        (7 * 10**14, "700.0 TB"),
    ],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (89, "89 s"), (90, "2 min"), (5340, "89 min"), (5400, "1 h 30 min"), (90000, "25 h 0 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_table() -> None:
    lines = table(("name", "count"), [("a", 1), ("long name", 100)]).splitlines()
    assert lines == ["name       count", "---------  -----", "a              1", "long name    100"]
    assert table(("name",), []).splitlines() == ["name", "----"]


def test_progress_is_silent_where_nobody_watches(capfd: pytest.CaptureFixture[str]) -> None:
    assert list(progress(range(3), 3, "working")) == [0, 1, 2]
    bitport.quantize_(nn.Linear(32, 8), "int8")
    bitport.quantize_(nn.Linear(32, 8), "int8", progress=False)
    assert capfd.readouterr() == ("", "")


def test_progress_when_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    assert list(progress(range(2), 2, "working", show=True)) == [0, 1]
    out, err = capfd.readouterr()
    assert out == ""
    assert "working [########################] 2/2, 0 s left" in err
    assert err.endswith("\n")
