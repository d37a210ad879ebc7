"""save(): write a model, tensor by tensor, to a checkpoint directory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor, nn

from bitport.arguments import path_of
from bitport.checkpoint.manifest import Manifest
from bitport.checkpoint.sharded import is_shared, wholes, written_by_one
from bitport.checkpoint.slots import Slot, identity, slots
from bitport.checkpoint.writer import SHARD_SIZE, Writer
from bitport.nn.fsdp import reshard_
from bitport.nn.offloaded import refuse_offloaded
from bitport.nn.targets import check_model
from bitport.report.progress import progress as with_progress


def save(
    model: nn.Module,
    directory: str | Path,
    *,
    shard_size: int | str = SHARD_SIZE,
    progress: bool | None = None,
    carry: Iterable[tuple[str | Path, str | Path]] = (),
) -> Manifest:
    """Write every parameter and buffer of ``model``, quantized or not, to ``directory``, replacing any checkpoint
    there. Files that are not bitport's are kept. An interrupted save leaves the old checkpoint intact.

    A tensor on another device, or in a packed layout, is brought to the CPU in its canonical form on its own: beside
    the model only one tensor is in memory at a time. A model that several processes hold together (DTensors) is saved
    by all of them: they gather it tensor by tensor, and the first writes.
    ``shard_size``: the largest size of a file, in bytes or as a text, "5GB" or "500MiB".
    ``carry``: further files that appear in the directory together with the checkpoint, as (name, content), where the
    content is a text, or the path of a file to copy.
    """
    check_model(model)
    refuse_offloaded(model)
    folder = path_of(directory, "directory")
    reshard_(model)
    every = list(slots(model))
    stream = wholes(with_progress(every, len(every), "saving", progress))

    def write() -> Manifest:
        return _write(stream, folder, shard_size, carry)

    return written_by_one(write, stream, folder) if is_shared(every) else write()


def _write(
    stream: Iterable[tuple[Slot, Tensor]],
    directory: Path,
    shard_size: int | str,
    carry: Iterable[tuple[str | Path, str | Path]],
) -> Manifest:
    names: dict[object, str] = {}
    with Writer(directory, shard_size=shard_size) as writer:
        for slot, tensor in stream:
            name = names.setdefault(identity(slot.tensor), slot.name)
            if name == slot.name:
                writer.add(name, tensor, buffer=slot.buffer)
            else:
                writer.tie(slot.name, name)
        for relative, content in carry:
            writer.carry(relative, content)
    return writer.manifest
