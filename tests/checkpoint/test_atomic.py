"""A save that is killed at any point leaves a complete checkpoint: the old one, or, from one step on, the new one.

The child process is killed (os._exit: nothing is cleaned up) before the first, second, ... of the calls through which a
save touches the disk; the parent then loads what is there.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

import bitport as bp
from bitport.checkpoint import read_manifest, writer
from bitport.checkpoint.manifest import INDEX, NAME
from bitport.checkpoint.output import FOLDER
from bitport.interop import convert
from tests.scripts import printed

from .models import long_ago
from .test_convert import Llama, write

KILLED = """
import builtins, json, os, sys, torch
from pathlib import Path
from torch import nn
import bitport as bp
torch.set_num_threads(1)
directory, calls, left = Path(sys.argv[1]), [], 0

def counted(owner, name):
    original = getattr(owner, name)
    def call(*args, **kwargs):
        global left
        if left is not None:
            if left == 0:
                os._exit(9)
            left -= 1
        return original(*args, **kwargs)
    setattr(owner, name, call)

def model(value):
    made = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 4))
    for parameter in made.parameters():
        nn.init.constant_(parameter, value)
    bp.quantize_(made, "int8", measure=False)
    return made

old, new = model(1.0), model(2.0)
left = None
touching = [(builtins, "open"), (os, "open"), (os, "fsync"), (os, "replace"), (Path, "unlink"), (Path, "mkdir")]
for owner, name in touching:
    counted(owner, name)
seen = []
for step in range(1000):
    place = directory / str(step)
    bp.save(old, place, shard_size=1)
    child = os.fork()
    if child == 0:
        left = step
        bp.save(new, place, overwrite=True, shard_size=1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    loaded = bp.load(nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 4)), place, verify=True)
    first = round(loaded[0].weight.dequantize()[0, 0].item(), 3)
    seen.append((code, loaded[0].bias[0].item(), loaded[1].bias[0].item(), first))
    if code != 9:
        break
print(json.dumps(seen))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_every_step(tmp_path: Path) -> None:
    seen = json.loads(printed(KILLED, tmp_path))
    codes, values = [code for code, *_ in seen], [value for _, *value in seen]
    assert codes == [9] * (len(seen) - 1) + [0]
    assert len(seen) > 20  # four shards, each opened and synced, the manifest, the directory, the removal of the old
    assert all(value in ([1.0] * 3, [2.0] * 3) for value in values)
    assert values == sorted(values), "old up to one step, new from there on"
    assert values[0] == [1.0] * 3
    assert values[-2] == [2.0] * 3


def test_what_a_killed_save_left(tmp_path: Path) -> None:
    """A later save removes its files once no writer can still be using them."""
    bp.save(nn.Linear(2, 2), tmp_path)
    unfinished = bp.checkpoint.Writer(tmp_path)
    unfinished.add("never finished", torch.ones(5))
    (begun,) = {path.name for path in tmp_path.glob("model-*")} - set(read_manifest(tmp_path).shards)
    for left in ({begun}, set()):
        bp.save(nn.Linear(2, 2), tmp_path, overwrite=True)
        named = {"bitport.json", INDEX, *read_manifest(tmp_path).shards}
        assert {path.name for path in tmp_path.iterdir()} == named | left
        if left:
            long_ago(tmp_path / begun)
    unfinished.abandon()


@pytest.mark.parametrize("how", ["save", "quantize_files", "convert"])
def test_folders_survive_a_power_failure_too(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that was moved is there after it only if its folder, and those that name it, were written to disk since;
    all before the file that makes a checkpoint of them."""
    source, out = tmp_path / "hf", tmp_path / "out"
    write(Llama(), source)
    (source / "a" / "b").mkdir(parents=True)
    (source / "a" / "b" / "chat_template.jinja").write_text("{{ messages }}")
    if how == "convert":
        bp.checkpoint.quantize_files(source, tmp_path / "int4", {"*.q_proj": "int4-g32", "*": "skip"}, progress=False)
    unwritten: set[str] = set()
    last: list[tuple[str, set[str]]] = []
    replace, sync = os.replace, writer.sync_directory

    def replaced(file: Path, target: Path) -> None:
        last.append((target.name, set(unwritten)))
        replace(file, target)
        folders = [folder for folder in target.relative_to(tmp_path).parents if folder.name]
        unwritten.update(str(folder) for folder in folders if FOLDER not in folder.parts)

    def synced(folder: Path) -> None:
        sync(folder)
        unwritten.discard(str(folder.relative_to(tmp_path)))

    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr(writer, "sync_directory", synced)
    if how == "save":
        with writer.Writer(out) as files:
            files.add("weight", torch.zeros(2, 2))
            files.carry("a/b/chat_template.jinja", "{{ messages }}")
    elif how == "quantize_files":
        bp.checkpoint.quantize_files(source, out, "int4-g32", progress=False)
    else:
        convert(tmp_path / "int4", out, to="compressed-tensors")
    assert (out / "a" / "b" / "chat_template.jinja").is_file()
    assert last[-1] == ("config.json" if how == "convert" else NAME, set())
    assert not unwritten


def test_a_shard_in_use_stays_until_it_can_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows does not remove a file that a loaded model still maps: saving in its place works nevertheless, and a
    later save removes the file."""
    bp.save(nn.Linear(2, 2), tmp_path)
    (used,) = read_manifest(tmp_path).shards
    remove = Path.unlink

    def as_on_windows(path: Path, missing_ok: bool = False) -> None:
        if path.name == used:
            raise PermissionError(13, "the file is in use by another process", str(path))
        remove(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", as_on_windows)
    saved = nn.Linear(2, 2)
    bp.save(saved, tmp_path, overwrite=True)
    (new,) = read_manifest(tmp_path).shards
    assert {path.name for path in tmp_path.glob("model-*")} == {used, new}
    assert torch.equal(bp.load(nn.Linear(2, 2), tmp_path, verify=True).weight, saved.weight)
    monkeypatch.undo()
    long_ago(tmp_path / used)
    bp.save(nn.Linear(2, 2), tmp_path, overwrite=True)
    assert {path.name for path in tmp_path.glob("model-*")} == set(read_manifest(tmp_path).shards)
