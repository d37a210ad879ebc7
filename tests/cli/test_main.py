"""What all verbs of the command line share: help, examples, exit codes, streams."""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import bitport
from bitport.cli import main as cli
from bitport.errors import CheckpointError

from ..scripts import ended
from .conftest import Run

VERBS = next(a for a in cli.parser()._actions if isinstance(a, argparse._SubParsersAction)).choices
EXAMPLES = [
    line.strip() for verb in VERBS.values() for line in (verb.epilog or "").splitlines() if line.startswith("  bitport")
]


def test_the_verbs_are_these() -> None:
    assert list(VERBS) == [
        "quantize",
        "convert",
        "inspect",
        "explain",
        "eval",
        "compare",
        "generate",
        "export",
        "bench",
        "tune",
        "doctor",
    ]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([verb, "--help"])
    shown = capsys.readouterr().out
    assert stopped.value.code == 0
    assert "examples:" in shown
    assert "--json" in shown
    assert not [action.dest for action in VERBS[verb]._actions if not action.help]


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_in_the_help_are_right(example: str) -> None:
    cli.parser().parse_args(shlex.split(example)[1:])


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert re.fullmatch(r"bitport \S+\n", capsys.readouterr().out)


WRONG = {
    "no verb": [],
    "unknown verb": ["quantise"],
    "unknown option": ["quantize", "llama", "--scheme", "int4", "--algoritm", "gptq"],
    "missing argument": ["compare", "llama"],
    "report of another kind": ["compare", "llama", "--text", "t", "--report", "r.pdf"],
    "zero window": ["eval", "llama", "--text", "t", "--window", "0"],
    "words for rows": ["explain", "llama", "--rows", "1,many"],
    "no such device": ["explain", "llama", "--device", "warp drive"],
    "device without numbers": ["generate", "llama", "--prompt", "a", "--device", "meta"],
    "device without numbers to quantize on": ["quantize", "llama", "--scheme", "int4", "--device", "meta"],
    "device without numbers to measure on": ["bench", "--device", "meta"],
    "half a rule": ["quantize", "llama", "--rule", "int4"],
    "half a shape": ["bench", "--shapes", "4096"],
    "static scheme": ["bench", "--schemes", "int8-static"],
    "no name of a directory": ["quantize", "llama", "--scheme", "int4", "-o", ""],
    "seed of too many digits": ["generate", "llama", "--prompt", "a", "--seed", "99999999999999999999"],
    "seed below zero": ["quantize", "llama", "--scheme", "int4", "--data-seed", "-1"],
    "unknown dtype": ["quantize", "llama", "--scheme", "int4", "--dtype", "int3"],
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_usage_is_2(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(WRONG[case])
    printed = capsys.readouterr()
    assert (stopped.value.code, printed.out) == (2, "")
    assert re.fullmatch(r"bitport.*: error: .*; bitport.* --help shows what there is\n", printed.err)


def test_an_option_with_a_typing_error_is_told_with_the_one_it_resembles(run: Run) -> None:
    ran = run("quantize", "llama", "--scheme", "int4", "--algoritm=gptq")
    assert ran.err.startswith(
        "bitport quantize: error: unrecognized arguments: --algoritm=gptq (did you mean --algorithm?)"
    )
    assert "did you mean" not in run("doctor", "everything").err


def test_an_error_is_one_message_without_traceback(run: Run, tmp_path: Path) -> None:
    ran = run("inspect", tmp_path)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("bitport: error: ")
    assert len(ran.err.splitlines()) == 1


def test_debug_shows_where_an_error_comes_from(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        cli.main(["inspect", str(tmp_path), "--debug"])


def test_interrupt_is_130(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bitport.cli.inspect.examine", interrupted)
    assert run("inspect", tmp_path).code == 130


TERMINATED = """
import os, signal, sys, time
from bitport.cli import inspect, main

def examine(path):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    finally:
        print("cleaned up")

inspect.examine = examine
code = main.main(["inspect", sys.argv[1]])
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
signal.signal(signal.SIGTERM, lambda *_: print("its own way"))
inspect.examine = lambda path: os.kill(os.getpid(), signal.SIGTERM) or sys.exit(7)
try:
    main.main(["inspect", sys.argv[1]])
except SystemExit as ended:
    assert ended.code == 7
sys.exit(code)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows ends a process without asking it")
def test_a_scheduler_ends_it_like_an_interrupt(tmp_path: Path) -> None:
    done = ended(TERMINATED, tmp_path)
    assert (done.returncode, done.stderr) == (130, "bitport: interrupted\n")
    assert done.stdout.split("\n") == ["cleaned up", "its own way", ""]


def test_a_full_disk_is_one_message(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("bitport.cli.inspect.examine", full)
    ran = run("inspect", tmp_path)
    assert (ran.code, ran.err) == (1, "bitport: error: [Errno 28] No space left on device\n")


@pytest.fixture
def matrix(tmp_path: Path) -> Path:
    """A directory with one matrix and no model, for which transformers is not imported: that takes longer than the
    rest of a process."""
    (source := tmp_path / "matrix").mkdir()
    save_file({"a.weight": torch.ones(64, 64)}, source / "model.safetensors")
    return source


WARNS = """
import sys, warnings
from bitport.cli import inspect, main

def examine(path):
    warnings.warn("of others")
    raise OSError

inspect.examine = examine
main.main(["quantize", sys.argv[1], "--scheme", "int4", "--dry-run"])
main.main(["inspect", sys.argv[1]])
"""


def test_a_warning_is_one_message(matrix: Path) -> None:
    """Without the place in the source that it comes from, which others' warnings keep."""
    (matrix / "unfinished").mkdir()
    errors = ended(WARNS, matrix).stderr
    assert f"\nbitport: warning: {matrix / 'unfinished'} is not carried over: bitport keeps" in f"\n{errors}"
    assert "side_files.py" not in errors
    assert re.search(r"^<string>:\d+: UserWarning: of others$", errors, re.MULTILINE)


def test_as_a_module_with_a_reader_that_leaves() -> None:
    """``python -m bitport doctor | head -0``: the reader closes the pipe."""
    words = [sys.executable, "-m", "bitport", "doctor"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
    assert (process.returncode, errors) == (0, b"")


@pytest.mark.parametrize(("source", "closed"), [("matrix", ">&-"), ("matrix", "2>&-"), ("llama", "<&- >&- 2>&-")])
def test_streams_that_are_closed(source: str, closed: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """As where a service starts it: the model is written, which is no error; with all closed, transformers is there
    too."""
    given = str(request.getfixturevalue(source))
    words = shlex.join([sys.executable, "-m", "bitport", "quantize", given, "--scheme", "int4", "-o"])
    assert subprocess.run(f"{words} {shlex.quote(str(tmp_path / 'out'))} {closed}", shell=True).returncode == 0
    assert (tmp_path / "out" / "bitport.json").is_file()


def test_reports_are_written_when_the_reader_has_left(matrix: Path, tmp_path: Path) -> None:
    words = [
        "quantize",
        str(matrix),
        "--scheme",
        "int4",
        "--dry-run",
        "--verbose",
        "--report",
        str(tmp_path / "r.json"),
    ]
    with subprocess.Popen([sys.executable, "-m", "bitport", *words], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
    assert process.returncode == 0
    assert [each["name"] for each in json.loads((tmp_path / "r.json").read_text())["result"]["layers"]] == ["a.weight"]


def test_what_the_terminal_cannot_show_is_no_error(tmp_path: Path) -> None:
    bitport.save(torch.nn.Linear(8, 8), tmp_path / "größer")
    words = [sys.executable, "-m", "bitport", "inspect", str(tmp_path / "größer")]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ran = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
    assert ran.returncode == 0, ran.stderr
    assert r"gr\xf6\xdfer" in ran.stdout


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8:surrogateescape"])
def test_what_a_file_says_does_not_control_the_terminal(encoding: str, matrix: Path, tmp_path: Path) -> None:
    """JSON holds any character, also half of one."""
    (matrix / "config.json").write_text(r'{"quantization_config": {"quant_method": "\u001b[2J\ud800"}}')
    env = {**os.environ, "PYTHONIOENCODING": encoding}
    for verb, code in ((["inspect"], 0), (["quantize", "--scheme", "int4", "-o", str(tmp_path / "out")], 1)):
        words = [sys.executable, "-m", "bitport", *verb, str(matrix)]
        ran = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
        assert ran.returncode == code, ran.stderr
        assert r"\x1b[2J\ud800" in ran.stdout + ran.stderr
        assert "\x1b" not in ran.stdout + ran.stderr
