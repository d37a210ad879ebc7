"""A small model directory, and the command line as a function."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest

from bitport.cli.main import main

from ..integrations.models import TEXT, make_directory


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)


class Run(Protocol):
    def __call__(self, *words: object) -> Ran: ...


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def command(*words: object) -> Ran:
        capsys.readouterr()
        try:
            code = main([str(word) for word in words])
        except SystemExit as stopped:  # by argparse
            code = int(str(stopped.code))
        return Ran(code, *capsys.readouterr())

    return command


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tied head in several shards."""
    return make_directory(tmp_path_factory.mktemp("cli") / "llama", shard_size="300KB")


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "text.txt"
    path.write_text(TEXT)
    return path
