"""What processes tell each other: run by tests/ranks.py."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from bitport.calibrate.processes import Processes
from bitport.errors import ArgumentError, BitportError


def check_a_result(mesh: DeviceMesh) -> None:
    processes = Processes.joined()
    for owner in range(processes.world):
        made = processes.shared(owner, lambda: torch.full((2,), processes.rank))
        assert made.tolist() == [owner, owner]
    assert processes.shared(0, lambda: None) is None


def check_an_error(mesh: DeviceMesh) -> None:
    """All processes raise the error of the owner, with its class, instead of waiting for a result."""
    processes = Processes.joined()

    def refuse() -> None:
        raise ArgumentError(f"refused by process {processes.rank}")

    for owner in range(processes.world):
        with pytest.raises(ArgumentError, match=f"refused by process {owner}"):
            processes.shared(owner, refuse)


def check_an_error_of_others(mesh: DeviceMesh) -> None:
    """One that is not bitport's may not survive the way to another process, which then raises its own."""
    processes = Processes.joined()

    def fail() -> None:
        raise KeyboardInterrupt

    for owner in range(processes.world):
        kind, told = (KeyboardInterrupt, "") if owner == processes.rank else (BitportError, f"process {owner} failed")
        with pytest.raises(kind, match=told):
            processes.shared(owner, fail)
