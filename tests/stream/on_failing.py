"""Runs of several processes in which one fails: run by tests/ranks.py."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bitport.calibrate.processes import Processes
from bitport.checkpoint.safetensors_writer import SafetensorsWriter
from bitport.errors import ArgumentError, BitportError, CheckpointError
from bitport.stream import Stream

from .models import batches, empty


def stream(target: str, recipe: Any, **options: Any) -> Stream:
    return Stream(empty(), "model", Path(target), recipe, batches=batches(), processes=Processes.joined(), **options)


def fill_up(patch: pytest.MonkeyPatch, rank: int, name: str, room: int) -> None:
    """The disk of process ``rank`` takes ``room`` more tensors in files with ``name`` in theirs."""
    left, write = [room], SafetensorsWriter.write

    def limited(self: SafetensorsWriter, key: str, tensor: Tensor) -> Any:
        left[0] -= name in self.path.name
        if left[0] < 0 and Processes.joined().rank == rank:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, key, tensor)

    patch.setattr(SafetensorsWriter, "write", limited)


def check_the_disk_of_the_result(mesh: DeviceMesh) -> None:
    """While it takes quantized weights, and while it takes the others of a finished step."""
    for room in (2, 9):
        with pytest.MonkeyPatch.context() as patch:
            run = stream(f"full{room}", {"*": "int4-g32"})
            fill_up(patch, 0, "model-", room)
            with pytest.raises(CheckpointError, match=r"No space left on device.*free some space, then resume"):
                run.run()
    stream("full2", {"*": "int4-g32"}, resume=True).run()


def check_the_disk_of_activations(mesh: DeviceMesh) -> None:
    for scheme, algorithm in (("int4-g32", "gptq"), ("int8-static", "rtn")):
        for rank in (0, 1):
            with pytest.MonkeyPatch.context() as patch:
                run = stream(f"{scheme}{rank}", {"*": scheme}, algorithm=algorithm, activations="disk")
                fill_up(patch, rank, "activations", 3)
                with pytest.raises(CheckpointError, match="activations cannot be written to"):
                    run.run()


def check_a_limit_of_one(mesh: DeviceMesh) -> None:
    """Of two machines one may have less memory."""
    rank = Processes.joined().rank
    for each in (0, 1):
        with pytest.raises(ArgumentError, match="are allowed"):
            stream(f"limit{each}", {"*": "int4-g32"}, memory_limit=1000 if rank == each else None)
        dist.barrier()
        assert not os.path.exists(f"limit{each}/unfinished")


def check_inputs_of_one(mesh: DeviceMesh) -> None:
    """Only the owner of a weight has the sum of its inputs."""
    for name in ("up", "down"):
        run = stream(name, {f"layers.1.{name}": "int4-g32", "layers.0.up": "int4-g32"})
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            read = run.place.value
            patch.setattr(run.place, "value", lambda key, read=read: read(key) + (torch.inf if "0.down" in key else 0))
            with pytest.raises(ArgumentError, match=r"NaN or infinity at the input of layers\.1"):
                run.run()


def check_a_batch_of_one(mesh: DeviceMesh) -> None:
    """An error that is not bitport's, such as memory that runs out, ends the others with one that names the process."""
    run = stream("memory", {"*": "int4-g32"})
    forward, rank = run.model.layers[1].forward, Processes.joined().rank

    def fails(*args: Any) -> Any:
        if rank == 1:
            raise MemoryError("too large")
        return forward(*args)

    run.model.layers[1].forward = fails
    kind, told = (MemoryError, "too large") if rank == 1 else (BitportError, "process 1 failed")
    with pytest.raises(kind, match=told):
        run.run()
