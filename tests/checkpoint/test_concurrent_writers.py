"""Concurrent saves into one directory: it holds the complete checkpoint of one of them."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bitport as bp
from bitport.checkpoint import Writer, concurrent_writers, read_manifest
from bitport.checkpoint import output as steps
from bitport.checkpoint import writer as module
from bitport.checkpoint.manifest import INDEX
from bitport.checkpoint.shards import Shards
from bitport.errors import CheckpointError
from tests.scripts import ended

pytestmark = pytest.mark.skipif(os.name != "posix", reason="locks are POSIX's")


def save(value: float, directory: Path) -> None:
    with Writer(directory, shard_size=1) as writer:
        for name in ("weight", "bias"):
            writer.add(name, torch.full((2, 2) if name == "weight" else (2,), value))


def loaded(directory: Path) -> float:
    """Return the value that every number of the checkpoint has."""
    model = bp.load(nn.Linear(2, 2), directory, verify=True)
    (value,) = {*model.weight.flatten().tolist(), *model.bias.tolist()}
    return value


def shards(directory: Path) -> set[str]:
    return {path.name for path in directory.glob("model-*")}


def at_step(monkeypatch: pytest.MonkeyPatch, owner: Any, step: int, do: Callable[[], None]) -> None:
    """Call ``do`` once, after call number ``step`` of sync_directory in ``owner``."""
    sync, calls = owner.sync_directory, 0

    def synced(directory: Path) -> None:
        nonlocal calls
        sync(directory)
        calls += 1
        if calls == step:
            do()

    monkeypatch.setattr(owner, "sync_directory", synced)


@pytest.mark.parametrize(("step", "last"), [(1, 2.0), (2, 3.0)], ids=["before its manifest", "behind it"])
def test_without_locks(step: int, last: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some network file systems: another process completes a save in the middle of a save."""

    def flock(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(concurrent_writers.fcntl, "flock", flock)
    save(1.0, tmp_path)
    at_step(monkeypatch, module, step, lambda: save(3.0, tmp_path))
    save(2.0, tmp_path)
    assert loaded(tmp_path) == last
    assert shards(tmp_path) == set(read_manifest(tmp_path).shards)


@pytest.mark.parametrize("step", [1, 2])
def test_the_second_waits(step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(1.0, tmp_path)
    second = threading.Thread(target=save, args=(3.0, tmp_path))

    def meanwhile() -> None:
        second.start()
        second.join(0.3)
        assert second.is_alive()

    at_step(monkeypatch, module, step, meanwhile)
    save(2.0, tmp_path)
    second.join()
    assert loaded(tmp_path) == 3.0
    named = set(read_manifest(tmp_path).shards)
    assert shards(tmp_path) == named
    assert set(json.loads((tmp_path / INDEX).read_text())["weight_map"]) == {"bitport.json", *named}


@pytest.mark.parametrize("before", ["__init__", "__exit__"], ids=["any shard is opened", "the first is closed"])
def test_a_load_that_a_save_overtakes_says_so(before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(1.0, tmp_path)
    call, overtaken = getattr(Shards, before), False

    def overtaking(*args: Any, **kwargs: Any) -> None:
        nonlocal overtaken
        if not overtaken:
            overtaken = True
            save(2.0, tmp_path)
        call(*args, **kwargs)

    monkeypatch.setattr(Shards, before, overtaking)
    with pytest.raises(CheckpointError, match=r"another checkpoint was saved to .* was read: load it again"):
        loaded(tmp_path)
    assert overtaken
    assert loaded(tmp_path) == 2.0


def test_quantized_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process saves while the finished files are being moved into place."""
    save_file({"weight": torch.full((2, 2), 2.0), "bias": torch.full((2,), 2.0)}, tmp_path / "model.safetensors")
    out = tmp_path / "out"
    save(1.0, out)
    writer = Writer(out, shard_size=1)
    writer.add("weight", torch.full((2, 2), 3.0))
    writer.add("bias", torch.full((2,), 3.0))
    monkeypatch.setattr(
        steps, "clear", lambda *args: (concurrent_writers.clear(*args), second.start(), second.join(0.3))
    )
    second = threading.Thread(target=writer.close)
    bp.checkpoint.quantize_files(tmp_path / "model.safetensors", out, {"*": "skip"}, overwrite=True, progress=False)
    second.join()
    assert loaded(out) == 3.0
    assert shards(out) == set(read_manifest(out).shards)


SAVING = """
import sys, torch
from pathlib import Path
from tests.checkpoint.test_concurrent_writers import save
from tests.scripts import forked
torch.set_num_threads(1)

def run(number):
    for _ in range(60):
        save(float(number), Path(sys.argv[1]))

forked(3, run)
"""


def test_many_at_once(tmp_path: Path) -> None:
    """Processes that save repeatedly; none fails."""
    done = ended(SAVING, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert loaded(tmp_path) in (0.0, 1.0, 2.0)
    assert shards(tmp_path) == set(read_manifest(tmp_path).shards)
