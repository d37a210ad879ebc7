"""Processes that calibrate one model together."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests import ranks

CHECKS = "tests.calibrate.on_processes"


@pytest.fixture(scope="module")
def told() -> dict[str, str]:
    return ranks.run(CHECKS, 2)


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.xdist_group("processes")  # started once, by one worker
@pytest.mark.parametrize("check", ranks.names(CHECKS))
def test_in_two_processes(told: dict[str, str], check: str) -> None:
    assert told[check] == ""
