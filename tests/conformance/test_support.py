"""docs/support.md is what the command generates from docs/support.json, and it covers every preset."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from bitport.conformance import Row, support_table
from bitport.conformance.command import keep, main
from bitport.conformance.matrix import FAMILIES
from bitport.ops.outside import OUTSIDE, Outside
from bitport.report.versions import library_version
from bitport.schemes import PRESETS

DOCS = Path(__file__).parents[2] / "docs"


def row(**changes: object) -> Row:
    fields = {"op": "linear", "subject": "int4", "dtype": "bfloat16", "samples": 7, "failures": (), "sqnr": 52.34}
    return Row(**{**fields, "margin": 6.04, "kernels": ("generic",), **changes})  # type: ignore[arg-type]


def table_of(path: Path) -> str:
    return support_table(json.loads(path.read_text()))


def test_the_document_is_made_from_the_results() -> None:
    assert (DOCS / "support.md").read_text() == table_of(DOCS / "support.json"), "run make support"


def test_every_preset_has_a_row_on_the_cpu() -> None:
    text = (DOCS / "support.md").read_text()
    assert [name for name in PRESETS if f"| {name} | cpu |" not in text] == []


def test_every_preset_is_in_one_family() -> None:
    assert sorted(name for names in FAMILIES.values() for name in names) == sorted(PRESETS)


def test_the_recorded_runs_passed() -> None:
    runs = json.loads((DOCS / "support.json").read_text())
    assert [(device, each["subject"]) for device, run in runs.items() for each in run["rows"] if each["failures"]] == []


def test_a_run_is_kept_beside_others(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "runs.json"
    keep(path, "cpu", [row()])
    keep(path, "xpu:1", [row(sqnr=math.inf, margin=math.inf), row(dtype="float16", failures=("int4-row: 3 dB",))])
    text = table_of(path)
    assert "| int4 | cpu | - | 52 (+6) | - | linear | generic |" in text
    assert "| int4 | xpu | - | **exact** | **1 failed** | linear | generic |" in text
    assert "| cuda | | | *not run* | | |" in text


def test_what_else_is_known_stands_there_until_the_suite_has_run(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    keep(path, "cpu", [row()])
    assert "H100" in table_of(path)
    keep(path, "cuda:0", [row()])
    assert "H100" not in table_of(path)


def test_a_device_of_another_library_is_called_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Outside("torchax, XLA:CPU", "jax 1, torchax 2", {}, lambda *args: None)
    monkeypatch.setitem(OUTSIDE, "jax", lambda: place)
    path = tmp_path / "runs.json"
    keep(path, "jax", [row(kernels=("jax", "jax.jit"), refused=("int4-tiles: no tiles", "int4-words: no words"))])
    text = table_of(path)
    assert f"| torchax, XLA:CPU | {library_version()} | {torch.__version__}, jax 1, torchax 2 | 7 | 0 | 2 |" in text
    assert "| int4 | torchax, XLA:CPU | - | 52 (+6) | - | linear | jax, jax.jit |" in text
    keep(path, "jax", [row(samples=0, sqnr=math.inf, margin=math.inf, kernels=(), refused=("int4-row: no",))])
    assert "| int4 | torchax, XLA:CPU | - | *refused* | - | linear |  |" in table_of(path)


def test_a_run_of_some_ops_leaves_the_others(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    keep(path, "cpu", [row(), row(op="embedding"), row(op="attention")])
    keep(path, "cpu", [row(op="embedding", samples=9)], ["embedding"])
    kept = {each["op"]: each["samples"] for each in json.loads(path.read_text())["cpu"]["rows"]}
    assert kept == {"linear": 7, "embedding": 9, "attention": 7}
    runs = json.loads(path.read_text())
    runs["cpu"]["torch"] = "another"
    path.write_text(json.dumps(runs))
    keep(path, "cpu", [row(op="embedding")], ["embedding"])
    assert [each["op"] for each in json.loads(path.read_text())["cpu"]["rows"]] == ["embedding"], "of other versions"


def test_a_run_without_refusals_is_read(tmp_path: Path) -> None:
    """A run stored without the field "refused", as in older files."""
    path = tmp_path / "runs.json"
    keep(path, "cpu", [row()])
    runs = json.loads(path.read_text())
    del runs["cpu"]["rows"][0]["refused"]
    assert "| 7 | 0 | 0 |" in support_table(runs)


def test_the_command_says_what_was_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    place = Outside("nowhere", "none 0", {}, lambda op, *args: "not today")
    monkeypatch.setitem(OUTSIDE, "privateuseone", lambda: place)
    assert main(["--device", "privateuseone", "--ops", "int4pack_mm"]) == 0
    said = capsys.readouterr().out
    assert "refused 48 samples of int4pack_mm: not today" in said
    assert "exact" not in said


def test_the_command_runs_one_op(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ops", "int4pack_mm", "--json", str(tmp_path / "runs.json")]) == 0
    assert "int4pack_mm" in capsys.readouterr().out
    assert main(["--table", str(tmp_path / "runs.json")]) == 0
    assert "| inner2-g32 | cpu |" in capsys.readouterr().out


def test_a_device_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "no-such-device"]) == 1
    assert "error:" in capsys.readouterr().err
