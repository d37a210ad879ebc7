"""A run that is killed at any point and resumed leaves the same files as an undisturbed one."""

from __future__ import annotations

import json
import os
import shutil
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch

from bitport.calibrate.blocks import Walk
from bitport.checkpoint.output import Output
from bitport.errors import ArgumentError
from bitport.stream import Stream
from tests.scripts import printed
from tests.turns import slow

from .models import batches, empty, hashes, write

KILLED = """
import sys, torch
from pathlib import Path
from bitport.algorithms import AWQ, GPTQ, Chain
from bitport.stream import Stream
from tests.killed import check_kills
from tests.stream.models import batches, empty
torch.set_num_threads(1)
folder, scheme, algorithm, activations = Path(sys.argv[1]), *sys.argv[2:]
quick = GPTQ(block=32, clip=False)
quick = {"gptq": quick, "awq+gptq": Chain((AWQ(steps=2),), quick, algorithm), "rtn": "rtn"}[algorithm]
options = {"algorithm": quick, "activations": activations, "resume": True, "measure": False}

def run(target):
    Stream(empty(), folder / "model", target, scheme, batches=batches(), **options).run()

check_kills(folder, run, 4)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills processes that it forks")
@pytest.mark.parametrize(
    ("scheme", "algorithm", "activations"),
    [
        ("int4-g32", "gptq", "disk"),
        *slow(("int4-g32", "awq+gptq", "memory"), ("int8-static", "rtn", "memory"), ("int8-static", "gptq", "disk")),
    ],
)
def test_kill(tmp_path: Path, scheme: str, algorithm: str, activations: str) -> None:
    """Once at each of several random writes, and twice in one run."""
    write(tmp_path)
    print(printed(KILLED, tmp_path, scheme, algorithm, activations))


BLOCK = ("up.weight", "down.weight", "experts")


class PowerFails(Exception):
    pass


def end_early(stream: Stream, steps: int) -> None:
    """Simulate a power failure after ``steps`` finished steps."""
    quantize = stream._quantize

    def until(*args: Any) -> None:
        if len(stream.output.done) == steps:
            raise PowerFails
        quantize(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "_quantize", until)
        with pytest.raises(PowerFails):
            stream.run()


@pytest.fixture
def begun(tmp_path: Path) -> tuple[Path, Path]:
    """Return (source, output with two finished steps)."""
    source, target = write(tmp_path), tmp_path / "out"
    end_early(Stream(empty(), source, target, "int4-g32", batches=batches(), activations="disk"), 2)
    return source, target


def test_what_is_done_is_not_done_again(begun: tuple[Path, Path]) -> None:
    source, target = begun
    stream = Stream(empty(), source, target, "int4-g32", batches=batches(), activations="disk", resume=True)
    assert stream.output.resumed == 2
    before = set(stream.output.layers)
    report = stream.run()
    new = {layer.name for layer in report.quantized} - before
    assert {name.split(".")[1] for name in new if name.startswith("layers")} == {"2"}
    assert len(before) == 2 * len(BLOCK)


def test_what_only_has_to_be_moved_is_not_calibrated_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(output: Output) -> None:
        raise PowerFails

    source, options = write(tmp_path), {"batches": batches(), "algorithm": "rtn"}
    report = Stream(empty(), source, tmp_path / "whole", "int4-g32", **options).run()
    with monkeypatch.context() as patch:
        patch.setattr(Output, "_move", fails)
        with pytest.raises(PowerFails):
            Stream(empty(), source, tmp_path / "out", "int4-g32", **options).run()
    monkeypatch.setattr(Walk, "__init__", lambda *args, **kwargs: pytest.fail("it was prepared"))
    assert Stream(empty(), source, tmp_path / "out", "int4-g32", resume=True, **options).run().layers == report.layers
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")


def test_the_journal_is_the_last_to_be_removed(begun: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it a run that is killed before would leave its activations for ever, and say that it is finished."""
    (source, target), removed, unlink = begun, [], os.unlink

    def noted(path: str | Path, **options: Any) -> None:
        removed.append(Path(path).name)
        unlink(path, **options)

    stream = Stream(empty(), source, target, "int4-g32", batches=batches(), activations="disk", resume=True)
    monkeypatch.setattr(os, "unlink", noted)
    stream.run()
    assert removed[-1] == "journal.json"
    assert not (target / "unfinished").exists()


def test_what_is_thrown_away_in_part_is_not_resumed(begun: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(folder: Path) -> None:
        raise PowerFails

    source, target = begun
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", fails)
        with pytest.raises(PowerFails):
            Stream(empty(), source, target, "int4-g32", batches=batches(), overwrite=True)
    assert Stream(empty(), source, target, "int4-g32", batches=batches(), resume=True).output.resumed == 0


@pytest.mark.parametrize("activations", ["memory", "disk"])
def test_scales_that_were_measured_are_not_measured_again(
    tmp_path: Path, activations: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, options = write(tmp_path), {"batches": batches(), "activations": activations}
    Stream(empty(), source, tmp_path / "whole", "int8-static", **options).run()
    end_early(Stream(empty(), source, tmp_path / "out", "int8-static", **options), 1)
    monkeypatch.setattr(Walk, "magnitudes", lambda *args: pytest.fail("they were measured"))
    Stream(empty(), source, tmp_path / "out", "int8-static", resume=True, **options).run()
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")


def test_what_would_fail_again_leaves_nothing_to_resume(tmp_path: Path) -> None:
    """Neither a run refused before it began nor one that fails because of its data; an earlier unfinished run is
    kept."""
    source, target = write(tmp_path), tmp_path / "out"
    with pytest.raises(ArgumentError, match="are allowed"):
        Stream(empty(), source, target, "int4-g32", batches=batches(), memory_limit=1000)
    assert not (target / "unfinished").exists()
    broken = [batch.clone() for batch in batches()]
    stream = Stream(empty(), source, target, {"embed": "int8", "*": "int8-static"}, batches=broken)
    stream.model.layers[1].register_forward_pre_hook(lambda *args: (args[1][0] * float("inf"), args[1][1]))
    with pytest.raises(ArgumentError, match=r"NaN or infinity at the input of layers\.1\.experts"):
        stream.run()
    assert not (target / "unfinished").exists()
    end_early(Stream(empty(), source, target, "int4-g32", batches=batches()), 2)
    with pytest.raises(ArgumentError, match="are allowed"):
        Stream(empty(), source, target, "int4-g32", batches=batches(), resume=True, memory_limit=1000)
    assert Stream(empty(), source, target, "int4-g32", batches=batches(), resume=True).output.resumed == 2


def test_a_run_that_was_interrupted_is_not_overwritten_in_silence(begun: tuple[Path, Path]) -> None:
    source, target = begun
    with pytest.raises(ArgumentError, match=r"an earlier run has begun: resume it \(--resume\), or overwrite"):
        Stream(empty(), source, target, "int4-g32", batches=batches())
    stream = Stream(empty(), source, target, "int4-g32", batches=batches(), overwrite=True)
    assert stream.output.resumed == 0


@pytest.mark.parametrize(
    ("options", "what"),
    [
        pytest.param({"recipe": "int3-g32"}, "recipe", id="recipe"),
        pytest.param({"batches": batches()[:2]}, "data", id="data"),
        pytest.param({"algorithm": "hqq"}, "algorithm", id="algorithm"),
        pytest.param({"dtype": torch.bfloat16}, "dtype", id="dtype"),
        pytest.param({"shard_size": 1000}, "shard_size", id="shard size"),
        pytest.param({"measure": False}, "measure", id="measure"),
    ],
)
def test_another_run_is_not_resumed(begun: tuple[Path, Path], options: dict[str, object], what: str) -> None:
    source, target = begun
    given = {"recipe": "int4-g32", "batches": batches(), **options}
    with pytest.raises(ArgumentError, match=f"begun with another {what}: give the same"):
        Stream(empty(), source, target, resume=True, **given)  # type: ignore[arg-type]


def test_one_token_that_changed_is_noticed(tmp_path: Path) -> None:
    """Also in the output of a tokenizer, and in the part of a long tensor that repr elides."""
    source, ids = write(tmp_path), torch.zeros(1, 2000, dtype=torch.int64)
    options: dict[str, Any] = {"model": empty(), "source": source, "target": tmp_path / "out", "recipe": "int4-g32"}
    Stream(**options, batches=[UserDict(ids=ids)])
    Stream(**options, batches=[{"ids": ids}], resume=True)
    ids[0, 1000] = 1
    with pytest.raises(ArgumentError, match="begun with another data"):
        Stream(**options, batches=[UserDict(ids=ids)], resume=True)


def test_a_source_that_changed_is_noticed(begun: tuple[Path, Path]) -> None:
    source, target = begun
    file = next(source.glob("*.safetensors"))
    os.utime(file, ns=(1, 1))
    with pytest.raises(ArgumentError, match="another source"):
        Stream(empty(), source, target, "int4-g32", batches=batches(), resume=True)


def test_resuming_nothing_begins(tmp_path: Path) -> None:
    Stream(empty(), write(tmp_path), tmp_path / "out", "int4-g32", batches=batches(), resume=True).run()
    assert json.loads((tmp_path / "out" / "bitport.json").read_text())["format"] == "bitport"
