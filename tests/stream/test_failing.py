"""Several processes, one of which fails: all end with its error, and none waits for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests import ranks

from .models import write

CHECKS = "tests.stream.on_failing"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("failing")).parent


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.xdist_group("stream with an error")  # started once, by one worker
@pytest.mark.parametrize("check", ranks.names(CHECKS))
def test_in_two_processes(folder: Path, check: str) -> None:
    ranks.must_pass(check, CHECKS, 2, folder)
