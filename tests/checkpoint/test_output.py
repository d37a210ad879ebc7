"""A conversion that is killed at any point and resumed leaves the same files as an undisturbed one."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import bitport.checkpoint.quantize as quantize
from bitport.checkpoint import quantize_files
from bitport.checkpoint.output import FOLDER, JOURNAL, STAGED, hashed
from bitport.checkpoint.quantize import QuantizeRun
from bitport.checkpoint.writer import SHARD_SIZE
from bitport.errors import ArgumentError, CheckpointError
from tests.scripts import printed
from tests.turns import slow

from ..stream.models import hashes
from .test_convert import Llama, write

KILLED = """
import sys, torch
from pathlib import Path
import bitport.checkpoint.quantize as quantize
from tests.killed import check_kills
torch.set_num_threads(1)
folder, quantize.STEP, algorithm = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
options = {"algorithm": algorithm, "resume": True}
check_kills(folder, lambda target: quantize.quantize_files(folder / "hf", target, "int4-g32", **options), 5)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills processes that it forks")
@pytest.mark.parametrize(("step", "algorithm"), [(1, "rtn"), *slow((8000, "rtn"), (8000, "clip"), (1, "hqq"))])
def test_kill(tmp_path: Path, step: int, algorithm: str) -> None:
    """Once at each of several random writes, and twice in one run."""
    write(Llama(), tmp_path / "hf", shards=2)
    print(printed(KILLED, tmp_path, step, algorithm))


OTHER = """
import sys
from pathlib import Path
from bitport.checkpoint import quantize_files
from bitport.errors import ArgumentError
folder = Path(sys.argv[1])
for option in ("resume", "overwrite"):
    try:
        quantize_files(folder / "hf", folder / "out", "int4-g32", **{option: True})
        print("written")
    except ArgumentError as error:
        print(error)
"""


LOCKS = pytest.mark.skipif(os.name == "nt", reason="there are no such locks on Windows")


@LOCKS
def test_a_run_is_neither_resumed_nor_discarded_while_it_lives(begun: Path) -> None:
    """Both would remove the shard that it is writing."""
    run = QuantizeRun(begun / "hf", begun / "out", "int4-g32", resume=True)
    left = hashes(begun / "out" / FOLDER)
    lines = printed(OTHER, begun).splitlines()
    for option in ("resume", "overwrite"):  # in this process, as another thread would
        with pytest.raises(ArgumentError) as error:
            quantize_files(begun / "hf", begun / "out", "int4-g32", **{option: True})
        lines.append(str(error.value))
    assert len(lines) == 4
    assert all(f"{FOLDER} is being written by another run, of this process or another: wait" in line for line in lines)
    assert hashes(begun / "out" / FOLDER) == left
    run.run()
    lines = printed(OTHER, begun).splitlines()
    assert "nothing is left to resume" in lines[0]
    assert lines[1] == "written"


@LOCKS
def test_another_process_resumes_a_run_that_failed_here(begun: Path) -> None:
    assert printed(OTHER, begun).splitlines() == ["written"] * 2


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="Linux tells the open files of a process")
def test_a_run_that_fails_leaves_no_file_open(begun: Path) -> None:
    def opened() -> list[str]:
        links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
        return [place for link in links if os.path.exists(link) and str(begun) in (place := os.readlink(link))]

    assert not opened()
    with pytest.raises(ArgumentError, match="begun with another recipe"):
        quantize_files(begun / "hf", begun / "out", "int8", resume=True)
    assert not opened()


class Stopped(Exception):
    pass


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the model "hf" and an "out" in which four tensors are done."""
    write(Llama(), tmp_path / "hf")
    monkeypatch.setattr(quantize, "STEP", 1)
    finish = quantize.Output.finish

    def finished(output: quantize.Output, step: str) -> None:
        finish(output, step)
        if len(output.done) == 4:
            raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(quantize.Output, "finish", finished)
        with pytest.raises(Stopped):
            quantize_files(tmp_path / "hf", tmp_path / "out", "int4-g32")
    return tmp_path


def test_what_is_done_is_not_done_again(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    add = quantize.Output.add
    monkeypatch.setattr(quantize.Output, "add", lambda self, name, value: (seen.append(name), add(self, name, value)))
    report = quantize_files(begun / "hf", begun / "out", "int4-g32", resume=True)
    left = seen.copy()
    whole = quantize_files(begun / "hf", begun / "whole", "int4-g32")
    assert left == seen[len(left) + 4 :]
    assert report.layers == whole.layers
    assert (report.bytes_before, report.bytes_after) == (whole.bytes_before, whole.bytes_after)


def test_it_is_not_overwritten_in_silence(begun: Path) -> None:
    with pytest.raises(ArgumentError, match=r"an earlier run has begun: resume it \(--resume\), or overwrite"):
        quantize_files(begun / "hf", begun / "out", "int4-g32")
    quantize_files(begun / "hf", begun / "out", "int4-g32", overwrite=True)
    assert not (begun / "out" / FOLDER).exists()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        pytest.param({"recipe": "int8"}, "recipe", id="recipe"),
        pytest.param({"algorithm": "hqq"}, "algorithm", id="algorithm"),
        pytest.param({"shard_size": SHARD_SIZE // 2}, "shard_size", id="shards"),
        pytest.param({"dtype": torch.bfloat16}, "dtype", id="dtype"),
        pytest.param({"measure": False, "dtype": torch.half}, "dtype, measure", id="dtype and errors"),
    ],
)
def test_another_run_is_not_resumed(begun: Path, options: dict[str, object], what: str) -> None:
    with pytest.raises(ArgumentError, match=f"begun with another {what}: give the same"):
        quantize_files(begun / "hf", begun / "out", **{"recipe": "int4-g32", "resume": True, **options})  # type: ignore[arg-type]
    assert (begun / "out" / FOLDER / JOURNAL).is_file()


OTHERS: dict[str, Callable[[dict[str, str]], object]] = {
    "bitport": lambda begun: begun.update(bitport="0.0"),
    "torch": lambda begun: begun.update(torch="1.0"),
    "data": lambda begun: begun.update(data="of a streamed run"),
    "measure": lambda begun: begun.pop("measure"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_run_of_another_version_or_kind_is_not_resumed(what: str, begun: Path) -> None:
    path = begun / "out" / FOLDER / JOURNAL
    journal = json.loads(path.read_text())
    OTHERS[what](journal["fingerprint"])
    path.write_text(json.dumps(journal))
    with pytest.raises(ArgumentError, match=f"begun with another {what}: give the same"):
        quantize_files(begun / "hf", begun / "out", "int4-g32", resume=True)


def test_what_differs_has_another_digest() -> None:
    """In values, in where one ends and the next begins, in names, and in dtypes and shapes of the same bytes."""
    x = torch.zeros(2, 3, dtype=torch.int32)
    given = ([1, 23], [12, 3], [1, 2, 3], [1, "23"], {"a": 1, "b": 23}, {"a": 1, "c": 23}, {"a": 12, "b": 3})
    given += (x, x + 1, x.T, x.view(torch.float32), [x, x], [x, 1], [x, x, 1])
    assert len({hashed(each) for each in given}) == len(given)
    assert hashed([1, x]) == hashed([1, x.clone()])


DAMAGE: dict[str, Callable[[dict[str, Any]], object]] = {
    "a missing key": lambda journal: journal.pop("done"),
    "another key": lambda journal: journal.update(more=1),
    "steps": lambda journal: journal.update(done={}),
    "names of steps": lambda journal: journal.update(done=[1]),
    "no truth": lambda journal: journal.update(closed="no"),
    "reports": lambda journal: journal.update(layers=[["name"]]),
    "a report": lambda journal: journal["layers"][0].update(sqnr="10"),
    "a key of a report": lambda journal: journal["layers"][0].pop("name"),
    "scales": lambda journal: journal.update(act_scales={"a": float("nan")}),
    "no manifest": lambda journal: journal.update(manifest=None),
    "text of no encoding": lambda journal: journal.update(manifest="\ud800"),
    "another manifest": lambda journal: journal.update(manifest="{}"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_journal(name: str, begun: Path) -> None:
    path = begun / "out" / FOLDER / JOURNAL
    journal = json.loads(path.read_text())
    DAMAGE[name](journal)
    path.write_text(json.dumps(journal))
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        quantize_files(begun / "hf", begun / "out", "int4-g32", resume=True)


def test_too_little_memory_is_told_before(tmp_path: Path) -> None:
    model = Llama().state_dict()
    save_file({name: model[name].clone() for name in model}, tmp_path / "m.safetensors")
    with pytest.raises(ArgumentError, match=r"this needs about .* of memory, and 1.0 kB are allowed"):
        quantize_files(tmp_path / "m.safetensors", tmp_path / "out", "int8", memory_limit=1000)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("lasts", [True, False], ids=["from then on", "once"])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_full_disk(call: str, lasts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails one write call later each time; resuming leads to the same files."""
    write(Llama(), tmp_path / "hf")
    monkeypatch.setattr(quantize, "STEP", 20_000)
    quantize_files(tmp_path / "hf", tmp_path / "whole", "int4-g32")
    original, left = getattr(os, call), 0
    failures: list[str] = []

    def limited(*args: object) -> None:
        nonlocal left
        left -= 1
        if left == -1 or (lasts and left < 0):
            raise OSError(errno.ENOSPC, "No space left on device")
        original(*args)

    monkeypatch.setattr(os, call, limited)
    told = "No space left on device. What finished steps wrote is kept: free some space, then resume"
    for allowed in range(50):
        left = allowed
        try:
            quantize_files(tmp_path / "hf", tmp_path / "out", "int4-g32", resume=True)
        except CheckpointError as error:
            failures.append(str(error))
        else:
            break
    assert len(failures) > 3
    assert all(told in failure for failure in failures)
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")


@pytest.mark.parametrize("killed", [False, True], ids=["at once", "resumed"])
def test_files_named_like_those_of_a_run(killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files beside the weights are carried over whatever their names. The run that is killed has just copied them."""
    write(Llama(), tmp_path / "hf")
    names = [JOURNAL, f"{JOURNAL}.new", "activations-0.json", f"{STAGED}/{JOURNAL}"]
    for name in names:
        (tmp_path / "hf" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "hf" / name).write_text(f"the user's {name}")
    if killed:
        with monkeypatch.context() as patch:
            patch.setattr(quantize.Output, "_note", noted_until_closed(quantize.Output._note))
            with pytest.raises(Stopped):
                quantize_files(tmp_path / "hf", tmp_path / "out", "int8")
    quantize_files(tmp_path / "hf", tmp_path / "out", "int8", resume=killed)
    assert {name: (tmp_path / "out" / name).read_text() for name in names} == {n: f"the user's {n}" for n in names}
    assert not (tmp_path / "out" / FOLDER).exists()


def noted_until_closed(note: Callable[[quantize.Output], None]) -> Callable[[quantize.Output], None]:
    def noted(output: quantize.Output) -> None:
        if output.closed:
            raise Stopped
        note(output)

    return noted
