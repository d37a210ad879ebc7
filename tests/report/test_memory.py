"""The memory that the system reports, and an estimate as text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bitport.errors import ArgumentError
from bitport.report import memory
from bitport.report.memory import Memory, available, free_on, peak, resident


def test_what_the_system_says() -> None:
    assert (peak() or 0) >= 0.9 * resident()
    limit = available()
    assert limit is None or limit > resident()


def test_a_peak_that_the_system_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows. A report of 0 bytes would be wrong."""
    monkeypatch.setattr(memory, "Path", lambda path: tmp_path / "no such file")
    monkeypatch.setattr(memory.sys, "platform", "win32")
    assert peak() is None


@pytest.mark.parametrize(
    ("said", "file"),
    [
        ("0::/a/b", "a/memory.max"),
        ("0::/", "memory.max"),
        ("5:cpu,memory:/docker/1f", "memory/memory.limit_in_bytes"),  # a container sees its own cgroup as the root
        ("4:cpuset:/\n3:memory:/a\n0::/a", "memory/a/memory.limit_in_bytes"),
    ],
)
def test_the_limit_of_a_control_group(said: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / file
    limit.parent.mkdir(parents=True, exist_ok=True)
    limit.write_text("1000000\n")
    (tmp_path / "own").write_text(said + "\n")
    monkeypatch.setattr(memory, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(memory, "GROUPS", tmp_path)
    assert available() == 1000000


def test_the_estimate_as_text() -> None:
    text = str(Memory(base=10**6, weights=2 * 10**6, activations=3, grams=4, work=5, disk=6))
    assert "weights 2.0 MB" in text
    assert "activations on disk 6 B" in text


def test_the_estimate_for_another_device_as_text() -> None:
    text = str(Memory(1, 2, 3, 4, 5, on_device=7 * 10**6, device=torch.device("cuda:1")))
    assert text.endswith("; on cuda:1 7.0 MB")


def test_what_pytorch_keeps_for_reuse_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"mem_get_info": (500, 900), "memory_reserved": 300, "memory_allocated": 100}
    for name, value in told.items():
        monkeypatch.setattr(torch.cpu, name, lambda device, value=value: value, raising=False)
    assert free_on(torch.device("cpu")) == 700
    monkeypatch.undo()
    assert free_on(torch.device("cpu")) is None


def test_more_than_is_allowed_is_refused() -> None:
    needed = Memory(base=0, weights=10**9, activations=0, grams=0, work=0)
    with pytest.raises(ArgumentError, match=r"this needs about 1.1 GB .*, and 1.0 GB are allowed: sell some"):
        needed.check(10**9, "sell some")
    needed.check(2 * 10**9, "sell some")
