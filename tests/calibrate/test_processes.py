"""Processes that calibrate one model together."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests import ranks

CHECKS = "tests.calibrate.on_processes"


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.xdist_group("processes")  # started once, by one worker
@pytest.mark.parametrize("check", ranks.names(CHECKS))
def test_in_two_processes(check: str) -> None:
    ranks.must_pass(check, CHECKS, 2)
