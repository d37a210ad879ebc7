"""How measured times become figures, the check and the page. All on made-up records."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench import measure, page, plot, products, results
from bench.measure import RESULTS
from bench.reached import Records
from bench.suites import QUICK_SCHEMES, QUICK_SHAPES, SCHEMES, class_of, suite_of

Row = dict[str, Any]


def row(peer: str, variant: str, rows: int, ms: float, speedup: float, kind: str = "4-bit", **more: Any) -> Row:
    figures = {"ms": ms, "speedup": speedup, "noise": 0.05, "repetitions": 5, "floor_ms": 0.25, "of_floor": 0.25 / ms}
    figures["nbytes"] = 9_000_000
    where = {"run": "r1", "suite": "llama", "k": 4096, "n": 4096, "rows": rows, "peer": peer, "variant": variant}
    return {**where, "class": kind, **figures, "sqnr_db": 55.0, "end_db": 20.0, "note": "native", **more}


HEAD = {
    "run": "r1",
    "commit": "abc",
    "isa": "",
    "machine": {"cpu": "Some CPU", "threads": 2},
    "limits": {"read": 2e10, "amx_bf16": 5e12},
    "versions": {"torch": "2"},
    "missing": {"quanto": "ImportError: none"},
}
LINES = [
    HEAD,
    *(row("torch", "bf16", m, ms, 1.0, "bf16") for m, ms in ((1, 2.0), (64, 4.0))),
    *(row("torch", "bf16 prepacked", m, ms, 1.25, "bf16") for m, ms in ((1, 1.6), (64, 3.2))),
    *(row("bitport", "int4", m, ms, speedup) for m, ms, speedup in ((1, 0.5, 4.0), (64, 5.0, 0.8))),
    *(row("aten", "int4", m, ms, speedup) for m, ms, speedup in ((1, 1.0, 2.0), (64, 20.0, 0.2))),
    {**row("ggml", "Q4_0", 64, 1, 1), "reason": "it crashed"},
]
del LINES[-1]["ms"]


def test_a_speedup_is_taken_within_repetitions() -> None:
    """The machine was half as fast in the second repetition, which does not affect the ratio."""
    base = {0: 1.0, 1: 2.0, 2: 1.0}
    found = products.figures_of({0: 0.5, 1: 1.0, 2: 0.25}, base)
    assert (found["speedup"], found["repetitions"], found["ms"]) == (2.0, 3, 500.0)
    assert found["noise"] == pytest.approx((3.0 - 2.0) / 2 / 2.0)


def test_a_slow_candidate_is_compared_where_it_was_measured() -> None:
    assert products.figures_of({1: 4.0}, {0: 9.0, 1: 2.0})["speedup"] == 0.5
    assert products.figures_of({0: 4.0}, {})["speedup"] is None


def test_repetitions_fit_the_budget() -> None:
    assert products.wanted(1e-4, repetitions=11) == 11
    assert products.wanted(products.BUDGET / 2 / 5, repetitions=11) == 5
    assert products.wanted(products.BUDGET, repetitions=11) == products.LEAST
    assert products.wanted(products.SINGLE * 2, repetitions=11) == 0


def test_the_newest_run_of_a_shape_counts() -> None:
    later = {**HEAD, "run": "r2"}
    again = [{**each, "run": "r2"} for each in LINES[1:]]
    alone = [{**row("bitport", "int4", 1, 1, 2), "run": "r3"}]
    forced = [{**HEAD, "run": "r4", "isa": "avx2"}, *({**each, "run": "r4"} for each in LINES[1:])]
    kept = results.newest([*LINES, later, *again, {**HEAD, "run": "r3"}, *alone, *forced])
    assert {each["run"] for each in kept} == {"r2"}, "r3 has fewer peers, r4 another instruction set"
    assert {each["run"] for each in results.newest([*LINES, *forced], "avx2")} == {"r4"}


def test_the_page_holds_what_was_measured(tmp_path: Path) -> None:
    figures = {"prompt_ms": 10.0, "prompt_speedup": 2.0, "tokens_per_second": 50.0, "speedup": 3.0, "noise": 0.1}
    generated = [
        {**HEAD, "model": "tinylm", "prompt": 128, "tokens": 16},
        {"run": "r1", "candidate": "bitport int4 eager", **figures},
        {"run": "r1", "candidate": "llama.cpp Q4_0", "reason": "it crashed"},
    ]
    for name, lines in (("products", LINES), ("generate", generated)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = page.page(Records(tmp_path))
    text = files["performance.md"]
    assert "| 1 | 2 | 1.25 | 4.00 (55 dB) | 2.00 (55 dB) aten int4 | 8.0 |" in text
    assert "| 64 | 4 | 1.25 | 0.80 (55 dB) | 0.20 (55 dB) aten int4 | 16.0 |" in text
    assert "ggml Q4_0: it crashed (4096x4096 at 64 rows)" in text
    assert "without quanto: ImportError: none" in text
    assert "| int4, 1 row | >= 3.5x bf16 | 4.00x (int4 4096x4096 at 1); median 4.00x | met |" in text
    assert "## Generation: tinylm" in text
    assert "| bitport int4 eager | 10.00 | 2.00 | 50.00 | 3.00 |" in text
    assert "- not measured: llama.cpp Q4_0: it crashed" in text
    assert [name for name in files if name.endswith(".svg")] == ["performance/4096x4096-4-bit.svg"]
    assert "performance/4096x4096-4-bit.svg" in text


def test_a_page_says_how_old_its_figures_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        names = ("-c", "user.name=x", "-c", "user.email=x")
        return subprocess.run(
            ["git", *names, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    git("init")
    for at in range(3):
        (tmp_path / "kernel").write_text(str(at))
        git("add", ".")
        git("commit", "-m", "x")
    first = git("rev-parse", "--short", "HEAD~2").strip()
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    assert measure.state_of(f"{first}+", "kernel") == f"commit {first}+ (kernel changed in 2 commits since)"
    assert measure.state_of(first, "other") == f"commit {first}"
    assert measure.state_of("abc", "kernel") == "commit abc"


def test_each_processor_has_a_page_of_its_own(tmp_path: Path) -> None:
    """A later run on another processor replaces neither the first page nor its reasons."""
    other = {**HEAD, "run": "r2", "machine": {**HEAD["machine"], "cpu": "Other (R) @ 2 GHz"}}
    lines = [*LINES, other, *({**each, "run": "r2", "speedup": 3.0} for each in LINES[1:] if "speedup" in each)]
    overhead = {"what": "scheme", "name": "int4", "ratio": 1.5, "machine": other["machine"]}
    profile = [HEAD, {"run": "r1", "rows": 1}]
    for name, each in (("products", lines), ("overhead", [overhead]), ("profile", profile)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in each))
    files = page.pages(tmp_path)
    first, second = files["performance.md"], files["performance-other-r-2-ghz.md"]
    assert "(others: [Other (R) @ 2 GHz](performance-other-r-2-ghz.md))" in first
    assert "| int4, 1 row | >= 3.5x bf16 | 4.00x (int4 4096x4096 at 1); median 4.00x | met |" in first
    assert "| int4, 1 row | >= 3.5x bf16 | 3.00x (int4 4096x4096 at 1); median 3.00x | missed |" in second
    assert "| eager overhead of a quantized linear | <= 2x that of nn.Linear | not measured | - |" in first
    assert (
        "| eager overhead of a quantized linear | <= 2x that of nn.Linear | 1.50x (int4); median 1.50x | met |"
        in second
    )
    assert "python -m bench.profile" not in second, "why is known of the first alone"
    assert "performance-other-r-2-ghz/4096x4096-4-bit.svg" in files


def test_a_chart_is_svg_with_logarithmic_axes() -> None:
    line = plot.Line("a < b", [(1, 1.0), (4, 10.0), (16, 100.0)], "ours")
    root = ElementTree.fromstring(plot.chart("t", "x", "y", [line, plot.Line("none", [], "peer")]))
    drawn = root.findall("{*}polyline")
    places = [tuple(map(float, pair.split(","))) for pair in drawn[0].attrib["points"].split()]
    assert places[1][0] - places[0][0] == pytest.approx(places[2][0] - places[1][0], abs=0.2)
    assert places[0][1] - places[1][1] == pytest.approx(places[1][1] - places[2][1], abs=0.2)
    assert places[0][1] > places[2][1], "y grows upward"
    texts = [each.text for each in root.findall("{*}text")]
    assert "a < b" in texts
    assert "none" not in texts
    assert {"1", "2", "4", "8", "16", "10", "100"} <= set(texts)


def test_the_suite_knows_its_schemes() -> None:
    assert set(QUICK_SCHEMES) <= set(SCHEMES)
    assert [class_of(name) for name in ("int4", "nf4", "int8-dyn", "int4-int8", "mxfp8-wo")] == [
        "4-bit",
        "4-bit",
        "8-bit x int8",
        "4-bit x int8",
        "8-bit",
    ]
    assert {class_of(name) for name in SCHEMES} == {kind for kinds in page.GROUPS.values() for kind in kinds}
    assert all(suite_of(shape) != "other" for shape in QUICK_SHAPES)


def test_recorded_runs_can_be_read() -> None:
    """Every row of the committed results belongs to a run with a header."""
    lines = results.lines_of(RESULTS / "products.jsonl")
    runs = results.runs_of(lines)
    assert [line for line in lines if line["run"] not in runs] == []


def test_lines_are_read_back(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    assert results.lines_of(tmp_path / "r.jsonl") == LINES
    assert results.lines_of(tmp_path / "none.jsonl") == []


def test_a_run_of_generation_stays_until_a_later_one_has_all_its_candidates() -> None:
    def run(name: str, *candidates: str) -> list[dict[str, object]]:
        head = {
            "run": name,
            "commit": "c",
            "machine": {"cpu": "c", "threads": 2},
            "model": "m",
            "prompt": 1,
            "tokens": 1,
        }
        figures = {"prompt_ms": 1.0, "prompt_speedup": 1.0, "tokens_per_second": 1.0, "speedup": 1.0}
        return [head, *({"run": name, "candidate": each, **figures} for each in candidates)]

    text = page.generation(run("r1", "a") + run("r2", "a", "peer") + run("r3", "a", "b"))
    assert [name in text for name in ("r1", "r2", "r3")] == [False, True, True]
