"""The demo, on a model of two layers: it runs, and its rows say what they should."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ..integrations.models import TEXT, make_directory

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


@pytest.fixture(scope="module")
def demo() -> Any:
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_directory(tmp_path_factory.mktemp("demo") / "llama", max_position_embeddings=1024)
    (directory / "eval.txt").write_text(TEXT * 2)
    return directory


def show(demo: Any, model: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    base = ["demo.py", "--model", str(model), "--tokens", "600", "--new-tokens", "4", "--schemes", "int4", "nf4"]
    monkeypatch.setattr(sys, "argv", [*base, *words])
    demo.main()


def test_table(demo: Any, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    show(demo, model, monkeypatch)
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[2:7]] == ["scheme", "------", "bf16", "int4", "nf4"]
    table, story = out.split("int4 goes on")
    assert table.isascii()
    assert demo.PROMPT in story


def test_json(demo: Any, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    show(demo, model, monkeypatch, "--json")
    rows = json.loads(capsys.readouterr().out)
    assert [row["scheme"] for row in rows] == ["bf16", "int4", "nf4"]
    assert rows[0]["bits_per_weight"] == 16
    assert all(row["tokens_per_second"] > 0 for row in rows)
    assert rows[1]["nbytes"] < rows[0]["nbytes"]
