"""A plugin of pytest (``-p bench.gpu.fresh``): after one bad access to memory all that its process does on a GPU fails,
right or wrong. The process of xdist where that happened ends, and the tests that are left run in a fresh one."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Once what went wrong was told to the process that has started this one."""
    if report.when == "teardown" and "PYTEST_XDIST_WORKER" in os.environ and torch.accelerator.is_available():
        try:
            torch.accelerator.synchronize()
        except RuntimeError:
            os._exit(1)
