"""save(): a model, tensor by tensor, into a checkpoint directory."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from bitport.checkpoint.manifest import Manifest
from bitport.checkpoint.slots import identity, slots
from bitport.checkpoint.writer import SHARD_SIZE, Writer
from bitport.report.progress import progress as with_progress


def save(
    model: nn.Module, directory: str | Path, *, shard_size: int = SHARD_SIZE, progress: bool | None = None
) -> Manifest:
    """Write every parameter and buffer of ``model``, quantized or not, to ``directory``, in place of the checkpoint
    that is there. Files that are not bitport's stay. An interrupted save leaves the old checkpoint whole.

    A tensor on another device, or in a packed layout, is brought to the CPU in its canonical form on its own: besides
    the model one tensor is in memory.
    """
    every = list(slots(model))
    names: dict[object, str] = {}
    with Writer(directory, shard_size=shard_size) as writer:
        for slot in with_progress(every, len(every), "saving", progress):
            name = names.setdefault(identity(slot.tensor), slot.name)
            if name == slot.name:
                writer.add(name, slot.tensor, buffer=slot.buffer)
            else:
                writer.tie(slot.name, name)
    return writer.manifest
