"""Write a checkpoint as a stream of tensors, atomically.

Shards get names that no earlier save used. Once all are on disk, the new manifest replaces the old one in a single step
(os.replace), and only then are the old shards removed. If this is interrupted anywhere, the directory still holds the
old checkpoint, intact.
"""

from __future__ import annotations

import contextlib
import os
import reprlib
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from bitport.arguments import bytes_of, path_of
from bitport.checkpoint.concurrent_writers import OURS, clear, locked, manifest_text
from bitport.checkpoint.dtypes import WEIGHT_DTYPES, name_of
from bitport.checkpoint.manifest import INDEX, NAME, Entry, Manifest, part_key
from bitport.checkpoint.safetensors_reader import unfit
from bitport.checkpoint.safetensors_writer import SafetensorsWriter, header_bytes
from bitport.errors import ArgumentError, CheckpointError, remedy
from bitport.report.versions import library_version
from bitport.tensor import QTensor
from bitport.tensor.parts import rows_and_columns

SHARD_SIZE = 4 * 10**9


class Writer:
    """``with Writer(directory) as writer: writer.add(name, tensor)``; leaving the block publishes the checkpoint, an
    error inside leaves the directory as it was. A shard ends before a tensor that would make it larger than
    ``shard_size``, in bytes or as a text, "5GB" or "500MiB".

    ``id``: eight hexadecimal digits for the names of the shards, by default random. ``begun``: what an earlier writer
    with this id has already written to finished shards."""

    def __init__(
        self, directory: str | Path, *, shard_size: int | str = SHARD_SIZE, id: str = "", begun: Manifest | None = None
    ) -> None:
        self.directory, self.shard_size = path_of(directory, "directory"), bytes_of(shard_size, "shard_size")
        self.id = id or secrets.token_hex(4)
        self.entries: dict[str, Entry] = dict(begun.tensors) if begun else {}
        self.tied: dict[str, str] = dict(begun.tied) if begun else {}
        self.shards: dict[str, int] = dict(begun.shards) if begun else {}
        self.owners = {entry.key(part): name for name, entry in self.entries.items() for part in entry.parts}
        """The owning tensor by the name of each part in the shards."""
        self.carried: dict[Path, Path] = {}
        self.current: SafetensorsWriter | None = None
        with self._reported():
            self.directory.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.ExitStack() as failed:
            failed.callback(self.abandon)
            if kind is None:
                self.close()
                failed.pop_all()

    def add(self, name: str, tensor: Tensor, *, buffer: str = "") -> None:
        """Write ``tensor`` immediately. ``buffer``: see :class:`Entry`."""
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ArgumentError(f"a checkpoint holds tensors by name, not a {type(tensor).__name__} by {name!r}")
        if reason := unfit(name):
            raise ArgumentError(f"{reprlib.repr(name)} {reason}, so it could not be read back: rename it")
        if name in self.entries or name in self.tied:
            raise ArgumentError(f"{name} was added already")
        parts = _parts(name, tensor)
        for key in (keys := [part_key(name, part) for part in parts]):
            if key in self.owners:
                raise ArgumentError(
                    f"{name} and {self.owners[key]} cannot be in one checkpoint: the parts of a quantized tensor are "
                    f"stored under its name and their own, and both would be {key}. Rename one of the two, or leave "
                    f"the quantized one as it is (a rule 'skip')"
                )
        with self._reported():
            shard = self._shard_for(dict(zip(keys, parts.values(), strict=True)))
            written = {part: shard.write(part_key(name, part), value) for part, value in parts.items()}
        self.owners |= dict.fromkeys(keys, name)
        described = (tensor.dtype, tuple(tensor.shape), written)
        if isinstance(tensor, QTensor):
            entry = Entry(name, shard.path.name, *described, tensor.scheme, tensor.transposed, buffer)
        else:
            entry = Entry(name, shard.path.name, *described, buffer=buffer)
        self.entries[name] = entry

    def tie(self, alias: str, name: str) -> None:
        """Make ``alias`` another name for the tensor ``name``."""
        if name not in self.entries or alias in self.entries or alias in self.tied:
            raise ArgumentError(
                f"{alias!r} cannot be tied to {name!r}: the first must be a new name, the second that of a tensor"
            )
        self.tied[alias] = name

    def carry(self, relative: str | Path, content: str | Path) -> None:
        """Add the file ``relative`` to the directory, from a file or a text ``content``. It appears together with the
        checkpoint."""
        staged = self._staged(len(self.carried))
        self.carried[staged] = Path(relative)
        with self._reported():
            if isinstance(content, Path):
                shutil.copyfile(content, staged)
            else:
                write_new(staged, content.encode())

    @property
    def manifest(self) -> Manifest:
        """The manifest of what has been written so far."""
        return Manifest(self.entries, self.tied, self.shards, library_version())

    def close(self) -> Manifest:
        """Finish the last shard and publish the checkpoint in the directory."""
        with self._reported():
            self.end_shard()
            self.carry(Path(INDEX), self.manifest.to_index())
            staged = self._staged("manifest")
            write_new(staged, self.manifest.to_json().encode())
            with locked(self.directory):
                for name, size in self.shards.items():
                    if os.path.getsize(self.directory / name) != size:
                        raise OSError(f"{name} was changed by another process in the meantime")
                for copy, relative in self.carried.items():
                    move(copy, self.directory, relative)
                replaced = manifest_text(self.directory)
                move(staged, self.directory, Path(NAME))
                clear(self.directory, self.shards, replaced)
        return self.manifest

    def abandon(self) -> None:
        """Remove what was written; an existing checkpoint stays."""
        if self.current is not None:
            self.current.abandon()
            self.current = None
        if self.directory.is_dir() and not self._committed():
            for path in self.directory.iterdir():
                if OURS.fullmatch(path.name) and f"-{self.id}-" in path.name:
                    path.unlink(missing_ok=True)

    def _shard_for(self, tensors: dict[str, Tensor]) -> SafetensorsWriter:
        header = sum(header_bytes(key, value) for key, value in tensors.items())
        nbytes = sum(value.nbytes for value in tensors.values())
        current = self.current
        if current and not (current.holds(header) and current.data_size + nbytes <= self.shard_size):
            self.end_shard()
        if self.current is None:
            name = f"model-{self.id}-{len(self.shards) + 1:05}.safetensors"
            self.current = SafetensorsWriter(self.directory / name, header)
        return self.current

    def end_shard(self) -> None:
        """Flush the current shard to disk; the next tensor starts a new one."""
        if self.current is not None:
            with self._reported():
                self.shards[self.current.path.name] = self.current.finish()
            self.current = None

    def _committed(self) -> bool:
        """Whether the checkpoint on disk is this one; reads the disk, which stays consistent across an interrupt."""
        return f"-{self.id}-" in manifest_text(self.directory)

    def _staged(self, what: object) -> Path:
        return self.directory / f".bitport-{self.id}-{what}"

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        """Convert OSError to a CheckpointError that explains the state of the checkpoint."""
        try:
            yield
        except OSError as error:
            self.abandon()
            there = "The new one is complete" if self._committed() else "What was there before is untouched"
            raise CheckpointError(
                f"writing the checkpoint {self.directory} failed: {error}. {there}; {remedy(error)} or choose another "
                "directory, and save again"
            ) from error


def _parts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The tensors to store for ``tensor``, by part."""
    if tensor.device.type == "meta":
        raise ArgumentError(f"{name} is on the meta device: it has no data to save")
    if isinstance(tensor, QTensor):
        if rows_and_columns(tuple(tensor.shape), tensor.batched, tensor.transposed) != tensor.matrix[1:3]:
            raise ArgumentError(f"{name} is an expanded view of a quantized tensor: save the tensor itself")
        if tensor.dtype not in WEIGHT_DTYPES:
            raise ArgumentError(
                f"{name} is quantized and stands for {tensor.dtype}; in a checkpoint such a tensor stands for one of "
                f"{', '.join(map(str, WEIGHT_DTYPES))}: cast it"
            )
        plain = tensor.to_layout("plain")
        return {part: getattr(plain, part) for part in plain.__tensor_flatten__()[0]}
    if is_traceable_wrapper_subclass(tensor) or tensor.layout != torch.strided:
        kind = f"{type(tensor).__name__} ({tensor.layout})"
        raise ArgumentError(
            f"{name} is a {kind}; a checkpoint holds dense and quantized tensors: gather or convert it first"
        )
    try:
        name_of(tensor.dtype)
    except ArgumentError as error:
        raise ArgumentError(f"{name}: {error}") from error
    return {"": tensor}


def write_new(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def move(file: Path, directory: Path, relative: Path) -> None:
    """Move ``file`` to the path ``relative`` in ``directory``, where it survives a power failure from then on."""
    (directory / relative).parent.mkdir(parents=True, exist_ok=True)
    os.replace(file, directory / relative)
    for folder in relative.parents:
        sync_directory(directory / folder)


def sync_directory(directory: Path) -> None:
    """Make renames survive a power failure, if the system allows directories to be opened (not on Windows)."""
    if os.name != "posix":
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
