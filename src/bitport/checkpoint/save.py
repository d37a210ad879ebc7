"""save(): write a model, tensor by tensor, to a checkpoint directory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor, nn

from bitport.arguments import path_of
from bitport.checkpoint.manifest import DIFFUSERS_INDEX, NAME, Manifest
from bitport.checkpoint.sharded import is_shared, wholes, written_by_one
from bitport.checkpoint.slots import Slot, identity, slots
from bitport.checkpoint.writer import SHARD_SIZE, Writer
from bitport.errors import ArgumentError, shortened
from bitport.nn.fsdp import reshard_
from bitport.nn.offloaded import refuse_offloaded
from bitport.nn.targets import check_model
from bitport.report.progress import progress as with_progress

WEIGHTS = tuple(
    f"{stem}{suffix}{index}"
    for stem, suffix in (
        ("model", ".safetensors"),
        ("pytorch_model", ".bin"),
        ("diffusion_pytorch_model", ".safetensors"),
        ("diffusion_pytorch_model", ".bin"),
    )
    for index in ("", ".index.json")
)
"""Files in which other loaders look for weights."""
FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Suffixes of names that are meant for files."""


def save(
    model: nn.Module,
    directory: str | Path,
    *,
    overwrite: bool = False,
    shard_size: int | str = SHARD_SIZE,
    progress: bool | None = None,
    carry: Iterable[tuple[str | Path, str | Path]] = (),
) -> Manifest:
    """Write every parameter and buffer of ``model``, quantized or not, to ``directory``. Files there that are not
    bitport's are kept; but a directory with weights that other libraries would load is refused, since it would hold two
    models.

    A tensor on another device, or in a packed layout, is brought to the CPU in its canonical form on its own: beside
    the model only one tensor is in memory at a time. A model that several processes hold together (DTensors) is saved
    by all of them: they gather it tensor by tensor, and the first writes.

    ``overwrite``: replace the checkpoint that is there, as in a training loop, or where each process saves the same
    model; an interrupted save leaves the old one intact.
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
        _check_free(folder, overwrite=overwrite)
        return _write(stream, folder, shard_size, carry)

    return written_by_one(write, stream, folder) if is_shared(every) else write()


def _check_free(directory: Path, *, overwrite: bool) -> None:
    if directory.exists() and not directory.is_dir():
        raise ArgumentError(f"{directory} is a file; a checkpoint is a directory: give another name")
    if directory.suffix in FILES and not directory.exists():
        raise ArgumentError(
            f"{directory} names a file, and a checkpoint is a directory: leave out {directory.suffix!r}, or make that "
            f"directory first"
        )
    if there := others(directory):
        raise ArgumentError(f"{directory} holds another model already ({shortened(there)}); choose another directory")
    if (directory / NAME).exists() and not overwrite:
        raise ArgumentError(f"{directory} holds a checkpoint already; overwrite=True replaces it")


def others(directory: Path) -> list[str]:
    """The names of files there with weights of a model that is no checkpoint of bitport."""
    ours = (directory / NAME).exists()
    return [name for name in WEIGHTS if (directory / name).exists() and not (ours and name == DIFFUSERS_INDEX)]


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
