"""Files in the user's cache folder."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bitport.backends import measured, user_cache
from bitport.errors import ArgumentError
from tests.scripts import printed

HOMELESS = """
import os
for name in ("HOME", "XDG_CACHE_HOME", "BITPORT_CACHE"):
    os.environ.pop(name, None)
import pwd
def unknown(number):
    raise KeyError(f"getpwuid(): uid not found: {number}")
pwd.getpwuid = unknown  # as of a user that only has a number
import warnings
warnings.simplefilter("error")
import torch
import bitport as bp
from bitport.backends import measured
from bitport.errors import ArgumentError
model = torch.nn.Sequential(torch.nn.Linear(64, 64))
bp.quantize_(model, "int4-g32")
print(*model(torch.ones(2, 64)).shape)
try:
    measured.check_kept()
except ArgumentError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="finds the home of a user in another way")
def test_a_user_without_a_home_has_no_cache() -> None:
    shape, error = printed(HOMELESS).splitlines()
    assert shape == "2 64"
    assert "name a folder that can be written in BITPORT_CACHE" in error


def test_threads_that_write_the_same_file(tmp_path: Path) -> None:
    """As processes do that have the same number in different containers."""
    file, contents = tmp_path / "cache" / "file", [bytes([at]) * 100_000 for at in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            assert [*pool.map(lambda content: user_cache.write(file, content), contents)] == [None] * 8
            assert file.read_bytes() in contents
    assert [*file.parent.iterdir()] == [file]


def test_an_interrupt_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user_cache.write(tmp_path / "file", b"old")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        user_cache.write(tmp_path / "file", b"new")
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("file", b"old")]


def test_the_folder_is_tried_by_several_processes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITPORT_CACHE", str(tmp_path))
    write = user_cache.write

    def removed_by_another(file: Path, content: bytes) -> None:
        write(file, content)
        file.unlink()

    monkeypatch.setattr(user_cache, "write", removed_by_another)
    measured.check_kept()
    monkeypatch.setenv("BITPORT_CACHE", os.devnull)
    with pytest.raises(ArgumentError, match="BITPORT_CACHE"):
        measured.check_kept()
