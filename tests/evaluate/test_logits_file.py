"""Logits on disk: bit for bit, never more than fits, and always cleaned up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bitport.errors import ArgumentError
from bitport.evaluate.logits_file import LogitsFile


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_read_is_what_was_written(tmp_path: Path, dtype: torch.dtype) -> None:
    parts = [torch.randn(rows, 11).to(dtype) for rows in (3, 1, 5)]
    parts[1] = parts[1].fill_(torch.nan)
    with LogitsFile(9, tmp_path) as held:
        for part in parts:
            held.write(part.t().contiguous().t())  # not contiguous
        for _ in range(2):
            assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(parts, held, strict=True))
        assert held.nbytes == sum(part.nbytes for part in parts)
        assert list(tmp_path.iterdir()) == [], "it has no name, so that nothing stays whatever happens"


def test_a_full_disk_is_told_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1000))
    with LogitsFile(10, tmp_path) as held, pytest.raises(ArgumentError, match=r"take 1\.2 kB for 10 tokens"):
        held.write(torch.zeros(1, 30))


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="is not a folder"):
        LogitsFile(1, tmp_path / "none")
