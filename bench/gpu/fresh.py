"""A pytest plugin (``-p bench.gpu.fresh``): after an invalid memory access everything that a process does on a GPU
fails. The xdist worker in which that happens exits, and the remaining tests run in a fresh one."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Exit once the failure has been reported to the parent process."""
    if report.when == "teardown" and "PYTEST_XDIST_WORKER" in os.environ and torch.accelerator.is_available():
        try:
            torch.accelerator.synchronize()
        except RuntimeError:
            os._exit(1)
