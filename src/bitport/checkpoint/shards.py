"""Reading the shards of a checkpoint. Before the first tensor is handed out every header has been compared with the
manifest, so that a damaged checkpoint is refused while the model is still as it was."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bitport.checkpoint.dtypes import TAGS, from_stored, stored_shape, to_bytes
from bitport.checkpoint.manifest import Entry, Manifest
from bitport.errors import CheckpointError


def inside(directory: Path, name: str) -> Path:
    """The regular file ``name`` of ``directory``. A link may lead elsewhere inside it, or, as in the cache of the
    Hugging Face hub, from ``snapshots/<revision>/`` to ``blobs/``."""
    path = directory / name
    home = directory.resolve()
    allowed = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be opened: {error}. Fetch the checkpoint again") from error
    if not any(target.is_relative_to(place) for place in allowed):
        raise CheckpointError(f"{path} is a link that leads out of the checkpoint, to {target}; it is not followed")
    if not target.is_file():
        raise CheckpointError(f"{path} is not a regular file")
    return target


class Shards:
    """The open shards of ``directory``, one at a time. ``verify``: compare every part's bytes with its checksum."""

    def __init__(self, directory: Path, manifest: Manifest, *, verify: bool = False) -> None:
        self.directory, self.verify = directory, verify
        self.name, self.file = "", None  # type: str, Any
        by_shard: dict[str, list[Entry]] = {name: [] for name in manifest.shards}
        for entry in manifest.tensors.values():
            by_shard[entry.shard].append(entry)
        for name, entries in by_shard.items():
            self._check_size(name, manifest.shards[name])
            self._check_header(name, entries)

    def __enter__(self) -> Shards:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def read(self, entry: Entry, part: str, device: torch.device) -> Tensor:
        """A tensor of its own on ``device``: nothing of it stays in the mapped file."""
        try:
            mapped = self._open(entry.shard).get_tensor(entry.key(part))
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            where = f"{self.directory / entry.shard}: {entry.key(part)}"
            raise CheckpointError(f"{where} cannot be read: {error}") from error
        if self.verify and zlib.crc32(to_bytes(mapped)) != entry.parts[part].crc32:
            raise CheckpointError(
                f"{self.directory / entry.shard}: the data of {entry.key(part)} is damaged (its checksum differs). "
                f"Fetch or save the checkpoint again"
            )
        own = mapped.clone() if device.type == "cpu" else mapped.to(device)
        return from_stored(own, entry.parts[part].dtype)

    def _check_size(self, name: str, expected: int) -> None:
        size = os.path.getsize(inside(self.directory, name))
        if size != expected:
            raise CheckpointError(
                f"{self.directory / name} has {size} bytes, the manifest says {expected}: it was cut or changed. "
                f"Fetch or save the checkpoint again"
            )

    def _check_header(self, name: str, entries: Iterable[Entry]) -> None:
        file = self._open(name)
        held = set(file.keys())
        for entry in entries:
            for part_name, part in entry.parts.items():
                key = entry.key(part_name)
                if key not in held:
                    raise CheckpointError(f"{self.directory / name} lacks {key}. Fetch or save the checkpoint again")
                view = file.get_slice(key)
                found = (view.get_dtype(), tuple(view.get_shape()))
                expected = (TAGS[part.dtype], stored_shape(part.dtype, part.shape))
                if found != expected:
                    raise CheckpointError(
                        f"{self.directory / name}: {key} is {found[0]} {list(found[1])}, the manifest says "
                        f"{expected[0]} {list(expected[1])}. Fetch or save the checkpoint again"
                    )

    def _open(self, name: str) -> Any:
        if name != self.name:
            self._close()
            path = inside(self.directory, name)
            try:
                self.file = safe_open(str(path), "pt").__enter__()
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is not a whole safetensors file: {error}. Fetch it again") from error
            self.name = name
        return self.file

    def _close(self) -> None:
        if self.file is not None:
            self.file.__exit__(None, None, None)
            self.name, self.file = "", None
