"""Writer and the files it writes: names, headers, other files in the directory, failures."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

import bitport as bp
from bitport.checkpoint import Writer, read_manifest, safetensors_reader
from bitport.checkpoint import safetensors_writer as module
from bitport.checkpoint.manifest import INDEX
from bitport.checkpoint.safetensors_reader import SafetensorsReader
from bitport.errors import ArgumentError, CheckpointError
from bitport.tensor import quantize_tensor
from tests.scripts import printed

from .models import assert_same, long_ago


@pytest.mark.parametrize("movable", [0, 10**6], ids=["room stays", "moved up"])
def test_headers(movable: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of 5000 bytes fill the header space of 65536 after 12; one of 70000 gets a file with more space.
    safetensors itself reads every file."""
    monkeypatch.setattr(module, "MOVABLE", movable)
    monkeypatch.setattr(safetensors_reader, "LONGEST", 70000)
    made = {f"{'é' * 800}{at}": torch.full((at,), at, dtype=torch.int16) for at in range(30)}
    made["x" * 70000] = torch.ones(3)
    with Writer(tmp_path) as writer:
        for name, tensor in made.items():
            writer.add(name, tensor)
    manifest = read_manifest(tmp_path)
    assert len(manifest.shards) == 4
    for shard in manifest.shards:
        with safe_open(str(tmp_path / shard), "pt") as file:
            for name in file.keys():  # noqa: SIM118
                assert torch.equal(file.get_tensor(name), made.pop(name))
        with SafetensorsReader(tmp_path / shard) as reader:
            first = min(span.start for span in reader.tensors.values())
            assert first % 8 == 0
            assert (first == 8 + module.ROOM) == (movable == 0) or first > 8 + module.ROOM
    assert not made


@pytest.mark.parametrize("quantized_first", [True, False])
def test_no_two_tensors_have_parts_of_one_name(quantized_first: bool, tmp_path: Path) -> None:
    """Otherwise the result could not be read, and would have replaced a checkpoint that could."""
    (first, one), (second, other) = [
        ("w", quantize_tensor(torch.randn(4, 32), "int8")),
        ("w.scale", torch.ones(4)),
    ][:: 1 if quantized_first else -1]
    said = rf"{second} and {first} cannot be in one checkpoint: .* both would be w\.scale\. Rename"
    with Writer(tmp_path) as writer:
        writer.add(first, one)
        with pytest.raises(ArgumentError, match=said):
            writer.add(second, other)
    assert list(read_manifest(tmp_path).tensors) == [first]


def test_tensors_may_lie_anyhow(tmp_path: Path) -> None:
    """A dimension of size one may have any stride, such as 0."""
    one, numbers = torch.tensor(1.5), torch.arange(6.0).reshape(2, 3)
    made = {"one": one.expand(1, 1), "many": one.expand(2, 2), "part": numbers[1:, 2:], "turned": numbers.t()}
    with Writer(tmp_path) as writer:
        for name, tensor in made.items():
            writer.add(name, tensor)
    with safe_open(str(tmp_path / next(iter(read_manifest(tmp_path).shards))), "pt") as file:
        for name, tensor in made.items():
            assert torch.equal(file.get_tensor(name), tensor)


def test_new_save_replaces_only_what_is_its_own(tmp_path: Path) -> None:
    others = ["config.json", "adapter.safetensors", "model-00001-of-00002.safetensors", "notes/model.txt"]
    (tmp_path / "notes").mkdir()
    for name in others:
        (tmp_path / name).write_text("kept")
    bp.save(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), tmp_path, shard_size=1)
    first = set(read_manifest(tmp_path).shards)
    for name in ("model-0123abcd-00001.safetensors", ".bitport-0123abcd-manifest"):
        (tmp_path / name).write_text("left by a killed save")
        long_ago(tmp_path / name)
    bp.save(nn.Linear(4, 4), tmp_path, overwrite=True)
    second = set(read_manifest(tmp_path).shards)
    assert not first & second
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {*others, "bitport.json", INDEX, *second}


def test_error_in_the_block_leaves_the_old(tmp_path: Path) -> None:
    old = nn.Linear(4, 4)
    bp.save(old, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def interrupted() -> None:
        with Writer(tmp_path, shard_size=1) as writer:
            writer.add("a", torch.ones(100))
            writer.add("b", torch.ones(100))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("at", range(4))
def test_an_interrupt_while_the_last_file_is_flushed_leaves_the_old(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes long for a large one. The flushes are those of two shards, the index and the manifest."""
    bp.save(nn.Linear(4, 4), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    flush, calls = os.fsync, iter(range(10))

    def flushed(handle: int) -> None:
        if next(calls) == at:
            raise KeyboardInterrupt
        flush(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", flushed)
        with pytest.raises(KeyboardInterrupt):
            bp.save(nn.Linear(100, 100), tmp_path, overwrite=True, shard_size=1)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_names_are_used_once(tmp_path: Path) -> None:
    with Writer(tmp_path) as writer:
        writer.add("a", torch.ones(1))
        writer.tie("b", "a")
        for name in ("a", "b"):
            with pytest.raises(ArgumentError, match="already"):
                writer.add(name, torch.ones(1))
        for alias, name in (("a", "a"), ("b", "a"), ("c", "b"), ("c", "nowhere")):
            with pytest.raises(ArgumentError, match="cannot be tied"):
                writer.tie(alias, name)


def test_a_name_that_readers_take_for_something_else(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="cannot be called __metadata__"), Writer(tmp_path) as writer:
        writer.add("__metadata__", torch.ones(3))
    assert not list(tmp_path.iterdir())


def test_a_quantized_tensor_stands_for_what_is_read_again(tmp_path: Path) -> None:
    q = bp.quantize_tensor(torch.randn(4, 64), "int8").to(torch.float8_e4m3fn)
    told = r"w is quantized and stands for torch\.float8_e4m3fn; .* stands for one of"
    with pytest.raises(ArgumentError, match=told), Writer(tmp_path) as writer:
        writer.add("w", q)
    assert not any(tmp_path.iterdir())


def test_shard_size_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"shard_size must be an amount of bytes, .* not 0$"):
        bp.save(nn.Linear(1, 1), tmp_path, shard_size=0)


def test_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"failed: .*Not a directory.*; mend that or choose another directory"):
        bp.save(nn.Linear(1, 1), tmp_path / "file" / "below")


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = nn.Linear(4, 4)
    bp.save(old, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        CheckpointError, match=r"No space left on device.*What was there before is untouched; free some space"
    ):
        bp.save(nn.Linear(8, 8), tmp_path, overwrite=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert_same(old, bp.load(nn.Linear(4, 4), tmp_path))


LIMITED = """
import resource, signal, sys, torch
from torch import nn
import bitport as bp
from bitport.errors import CheckpointError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
try:
    bp.save(nn.Linear(1000, 1000), sys.argv[1], overwrite=True)
except CheckpointError as error:
    print(error)
"""


@pytest.mark.skipif(os.name != "posix", reason="limits of file sizes are POSIX")
def test_write_that_the_system_refuses(tmp_path: Path) -> None:
    """A real failure inside a write, after its first byte: the process may only write files of up to 1 MB."""
    old = nn.Linear(4, 4)
    bp.save(old, tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    said = printed(LIMITED, tmp_path)
    assert "File too large" in said
    assert "untouched" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert_same(old, bp.load(nn.Linear(4, 4), tmp_path))
