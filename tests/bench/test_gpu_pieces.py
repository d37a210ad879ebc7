"""Measurements for short GPU sessions: pieces that can be interrupted, resumed, and merged into the records."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import measure
from bench.gpu import bring, methods, page, pieces, products, tune
from bench.suites import SUITES, Shape
from bitport.backends.triton import configs
from tests.bench import stand_in

Row = dict[str, Any]
ABOUT = {"device": "stand-in", "capability": "sm90", "toolkit": "12.9"}
PARSERS = {"bench.gpu.products": products.parser, "bench.gpu.methods": methods.parser}


@pytest.mark.parametrize("name", pieces.PIECES)
def test_a_piece_names_what_there_is(name: str, tmp_path: Path) -> None:
    _, option, module, *given = pieces.command(name, tmp_path, "cuda")
    assert option == "-m"
    assert not {"WORKERS", "DEVICE"} & set(given)
    if module == "pytest":
        files = [each for each in given if each.startswith("tests/")]
        assert files
        assert all((pieces.ROOT / each).exists() for each in files)
    else:
        importlib.import_module(module)
    if module in PARSERS:
        PARSERS[module]().parse_args(given)


def test_without_xdist_tests_run_in_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "-n" in pieces.command("kernels", tmp_path, "cuda")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    given = pieces.command("kernels", tmp_path, "cuda")
    assert not {"-n", "--maxschedchunk=1"} & set(given)
    assert given[-len(pieces.KERNELS) :] == list(pieces.KERNELS)


BROKEN = """
import torch

broken = []

def synchronize():
    if broken:
        raise RuntimeError("an illegal memory access was encountered")

torch.accelerator.is_available, torch.accelerator.synchronize = lambda: True, synchronize

def test_bad():
    broken.append(True)
    assert False, "a bad access"

def test_good():
    synchronize()
"""


def test_a_bad_access_fails_no_other_test(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text(BROKEN)
    command = [sys.executable, *pieces.TESTS, "-n", "1", f"--rootdir={tmp_path}", str(tmp_path)]
    done = subprocess.run(
        command, env=pieces.environment(tmp_path, "cuda"), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "a bad access" in done.stdout
    assert "1 passed" in done.stdout, done.stdout


ENDED = """
import os

def test_bad():
    assert False, "that is wrong"

def test_end():
    os.kill(os.getpid(), 9)
"""


def test_what_failed_is_told_at_once(tmp_path: Path) -> None:
    """A summary at the end would be lost if the process is killed."""
    assert "bench.gpu.told" in pieces.TESTS
    (tmp_path / "test_ended.py").write_text(ENDED)
    command = [sys.executable, "-m", "pytest", "-p", "bench.gpu.told", f"--rootdir={tmp_path}", str(tmp_path)]
    paths = {"PYTHONPATH": str(pieces.ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, env={**os.environ, **paths}, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert "test_ended.py::test_bad" in done.stdout
    assert "AssertionError: that is wrong" in done.stdout


def test_every_scheme_and_shape_of_a_piece_is_known(tmp_path: Path) -> None:
    chosen = products.chosen_of(products.parser().parse_args(pieces.command("products", tmp_path, "cuda")[3:]))
    assert set(chosen.schemes) <= set(products.SCHEMES)
    assert set(chosen.shapes) == {shape for suite in SUITES.values() for shape in suite}


def script(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setitem(pieces.PIECES, "quick", ("-c", text))


def test_records_go_into_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script(monkeypatch, "from bench.measure import append; append('one', [{'a': 1}]); print('done')")
    assert pieces.run("quick", tmp_path / "new", "cuda") == 0
    assert json.loads((tmp_path / "new" / "one.jsonl").read_text()) == {"a": 1}
    assert "== quick\ndone\n== quick: ended with 0" in (tmp_path / "new" / "pieces.txt").read_text()


def test_a_piece_that_fails_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script(monkeypatch, "raise SystemExit(3)")
    assert pieces.run("quick", tmp_path, "cuda") == 3
    assert "quick: ended with 3" in capsys.readouterr().out


SLOW = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("child", child.pid, flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("told to stop")
"""


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN], ids=["in-front", "in-background"])
def test_a_piece_is_stopped_in_time_with_what_it_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, handler: Any
) -> None:
    script(monkeypatch, SLOW)
    start, before = time.monotonic(), signal.signal(signal.SIGINT, handler)
    try:
        assert pieces.run("quick", tmp_path, "cuda", seconds=2.0) == pieces.STOPPED
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - start < 30
    said = (tmp_path / "pieces.txt").read_text()
    assert "told to stop" in said
    assert "stopped, to be called again" in said
    child = int(said.partition("child ")[2].split()[0])
    for _ in range(50):
        if not alive(child):
            return
        time.sleep(0.1)
    pytest.fail("the process that it started goes on")


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{process}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


def test_further_arguments_go_to_the_piece(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[Any] = []
    monkeypatch.setattr(pieces, "present", lambda: "cuda")
    monkeypatch.setattr(pieces, "run", lambda *args: given.append(args) or 0)
    monkeypatch.setattr(sys, "argv", ["pieces", "quick", "--folder", str(tmp_path), "--peers", "tinygemm"])
    assert pieces.main() == 0
    assert given == [("quick", tmp_path, "cuda", pieces.SECONDS, ("--peers", "tinygemm"))]
    assert pieces.command("quick", tmp_path, "cuda", ("--peers", "tinygemm"))[-2:] == ["--peers", "tinygemm"]
    monkeypatch.setattr(sys, "argv", ["pieces", "quick", "tune", "--peers"])
    with pytest.raises(SystemExit):
        pieces.main()


def test_pieces_share_what_time_there_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The total time limit applies whatever a piece still has to do; a crash does not count as success."""
    now, given = [1000.0], []

    def spent(name: str, folder: Path, device: str, seconds: float, more: tuple[str, ...]) -> int:
        given.append((name, seconds))
        now[0] += seconds
        return -signal.SIGSEGV

    monkeypatch.setattr(pieces, "present", lambda: "cuda")
    monkeypatch.setattr(pieces, "run", spent)
    monkeypatch.setattr(pieces.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(pieces.signal, "signal", lambda *args: None)
    options = ["--seconds", "100", "--in-all", "150", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["pieces", "kernels", "tests", "tune", *options])
    assert pieces.main() > 0
    assert given == [("kernels", 100.0), ("tests", 50.0 - pieces.GRACE)]
    assert "tune: left out, no time is left" in capsys.readouterr().out


TOLD_TO_END = """
import sys
from pathlib import Path
from bench.gpu import pieces
pieces.present = lambda: "cuda"
pieces.PIECES["quick"] = ("-c", "import os, time; print(f'here {os.getpid()} '); time.sleep(60)")
sys.argv = ["pieces", "quick", "--folder", sys.argv[1]]
sys.exit(pieces.main())
"""


def test_a_piece_ends_with_who_started_it(tmp_path: Path) -> None:
    """Otherwise it would keep computing on the device next to whatever comes next."""
    paths = {"PYTHONPATH": os.pathsep.join([str(pieces.ROOT / "src"), str(pieces.ROOT)])}
    process = subprocess.Popen([sys.executable, "-c", TOLD_TO_END, str(tmp_path)], env={**os.environ, **paths})
    log = tmp_path / "pieces.txt"
    while process.poll() is None and not (log.exists() and "here" in log.read_text()):
        time.sleep(0.05)
    process.terminate()
    assert process.wait(30) == pieces.STOPPED
    assert not alive(int(log.read_text().partition("here ")[2].split()[0]))


def test_without_a_device_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    monkeypatch.setattr(sys, "argv", ["pieces", "quick"])
    with pytest.raises(SystemExit, match="finds none here"):
        pieces.main()


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for module in (measure, bring):
        monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


def test_every_trial_of_a_table_is_kept(results: Path) -> None:
    def fake(device: torch.device, note: Callable[[Row], None]) -> Iterator[str]:
        note({"stage": "gemv", "rows": 1, "us": 5.0})
        assert len((results / "gpu-tune.jsonl").read_text().splitlines()) == 2, "written as it comes"
        yield "gemv: fast"

    tune.run(stand_in.gpu(), fake, "measured on a stand-in", keep=True)
    head, trial = (json.loads(line) for line in (results / "gpu-tune.jsonl").read_text().splitlines())
    assert (head["source"], head["gpu"]["device"]) == ("measured on a stand-in", "stand-in")
    assert trial == {"run": head["run"], "stage": "gemv", "rows": 1, "us": 5.0}


def test_records_are_brought_once(results: Path, tmp_path: Path) -> None:
    away = tmp_path / "away"
    away.mkdir()
    (away / "gpu-products.jsonl").write_text('{"run": 1}\n{"run": 1, "k": 2}\n')
    assert bring.records(away) == ["gpu-products: 2 lines"]
    with (away / "gpu-products.jsonl").open("a") as file:
        file.write('{"run": 2}\n')
    assert bring.records(away) == ["gpu-products: 1 lines"]
    assert (results / "gpu-products.jsonl").read_text() == (away / "gpu-products.jsonl").read_text()


@pytest.mark.parametrize(
    ("change", "recorded", "reason"),
    [
        ({}, True, None),
        ({}, False, "no record of a run says 'measured on a stand-in'"),
        ({"unmeasured": ["tiles 64", "rows int4"]}, True, "it was stopped before tiles 64"),
        ({"unmeasured": ["rows int4"]}, True, None),
        ({"version": 1}, True, "it is not of version"),
    ],
    ids=["whole", "no record", "stopped", "kinds left", "old"],
)
def test_a_table_is_shipped_whole_and_with_its_record(
    change: Row, recorded: bool, reason: str | None, results: Path, tmp_path: Path
) -> None:
    content = json.loads((configs.FOLDER / "sm90.json").read_text()) | {"source": "measured on a stand-in"} | change
    (tmp_path / "triton-sm90.json").write_text(json.dumps(content))
    if recorded:
        measure.append("gpu-tune", [{"run": "now", "source": "measured on a stand-in", "machine": {}}])
    (said,) = bring.tables(tmp_path, shipped=tmp_path)
    if reason:
        assert reason in said
        assert not (tmp_path / "sm90.json").exists()
    else:
        assert json.loads((tmp_path / "sm90.json").read_text()) == content


@pytest.mark.parametrize("file", sorted(configs.FOLDER.glob("*.json")), ids=lambda file: file.stem)
def test_a_table_is_written_as_those_that_are_shipped(file: Path) -> None:
    assert bring.as_text(json.loads(file.read_text())) == file.read_text()


def test_the_conformance_suites_run_is_put_beside_the_others(tmp_path: Path) -> None:
    docs, away = tmp_path / "docs", tmp_path / "away"
    docs.mkdir()
    away.mkdir()
    here = json.loads((bring.DOCS / "support.json").read_text())
    (docs / "support.json").write_text(json.dumps(here))
    (away / "support.json").write_text(json.dumps({"cpu": {"old": True}, "cuda": here["cpu"]}))
    assert bring.support(away, docs) == ["conformance: cuda"]
    merged = json.loads((docs / "support.json").read_text())
    assert merged == {**here, "cuda": here["cpu"]}
    assert "cuda" in (docs / "support.md").read_text()


CHOSEN = products.Chosen((Shape(64, 32), Shape(32, 64)), (1, 4), ("int4",), ("bitport",), 3, 1, "")


@pytest.mark.parametrize(
    ("change", "left"),
    [({}, 1), ({"commit": "b"}, 2), ({"gpu": {"device": "another"}}, 2), ({"chosen": {}}, 2)],
    ids=["same", "commit", "device", "choice"],
)
def test_a_stopped_run_of_the_same_is_gone_on_with(change: Row, left: int) -> None:
    head = {"run": "now", "machine": {}, "commit": "a", "gpu": ABOUT, "chosen": products.described(CHOSEN), **change}
    lines = [head, {"run": "now", "k": 64, "n": 32, "rows": 1, "ms": 1.0}]
    found = products.without_measured(CHOSEN, ABOUT, "a", json.loads(json.dumps(lines)))
    assert len(found.shapes) == left
    assert found.shapes[-1] == Shape(32, 64)


def timed(run: str, n: int, ms: float) -> Row:
    row = {"run": run, "suite": "other", "k": 64, "n": n, "rows": 4, "ms": ms, "repetitions": 3, "nbytes": 1}
    return {**row, "speedup": 1.0, "noise": 0.0, "of_floor": 0.5, "floor_ms": 0.5, "sqnr_db": 50.0, "end_db": 20.0}


def both(run: str, n: int, ms: float) -> list[Row]:
    names = (("torch", "bf16", "bf16"), ("bitport", "int4", "4-bit"))
    return [{**timed(run, n, ms), "peer": peer, "variant": name, "class": kind} for peer, name, kind in names]


def test_the_page_has_each_shape_from_the_newest_run_that_measured_it() -> None:
    """Each piece is a run of its own."""
    limits = {"copy": 1e12, "bf16": 1e14}
    heads = [
        {"run": run, "machine": {}, "commit": run, "gpu": ABOUT, "limits": limits, "versions": {}, "missing": {}}
        for run in ("1", "2")
    ]
    text = page.page([heads[0], *both("1", 32, 7.5), *both("1", 48, 8.5), heads[1], *both("2", 48, 9.5)], [])
    written = text["performance-gpu.md"]
    assert "| 4 | 7.5 |" in written
    assert "| 4 | 9.5 |" in written
    assert "8.5" not in written
    assert "- Run 1," in written
    assert "- Run 2," in written
