"""Read the shards of a checkpoint. Every header is checked against the manifest before the first tensor is returned, so
a damaged checkpoint is refused before the model is modified."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from bitport.checkpoint.concurrent_writers import manifest_text
from bitport.checkpoint.dtypes import TAGS, from_bytes, stored_shape
from bitport.checkpoint.manifest import Entry, Manifest
from bitport.checkpoint.safetensors_reader import SafetensorsReader
from bitport.checksum import crc32
from bitport.errors import CheckpointError

AGAIN = "Fetch or save the checkpoint again"


def inside(directory: Path, name: str) -> Path:
    """The regular file ``name`` in ``directory``. A link may point elsewhere inside it or, as in the cache of the
    Hugging Face hub, from ``snapshots/<revision>/`` or a folder below it to ``blobs/``."""
    path = directory / name
    home = directory.resolve()
    cached = (folder for folder in (home, *home.parents) if folder.parent.name == "snapshots")
    allowed = [home, *(folder.parent.parent / "blobs" for folder in cached)]
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be opened: {error}. {AGAIN}") from error
    if not any(target.is_relative_to(place) for place in allowed):
        raise CheckpointError(
            f"{path} is a link that leads out of its directory, to {target}, and is not followed: put the file itself "
            f"there"
        )
    if not target.is_file():
        raise CheckpointError(f"{path} is not a regular file. {AGAIN}")
    return target


def check_data(directory: Path, manifest: Manifest) -> None:
    """CheckpointError unless the data of every tensor matches its checksum in the manifest."""
    with Shards(directory, manifest, verify=True, mmap=True) as shards:
        for entry in manifest.tensors.values():
            for part in entry.parts:
                shards.read(entry, part)


class Shards:
    """The shards of ``directory``, opened one at a time. ``verify``: compare the data of every part with its checksum.
    ``mmap``: return views of the mapped file."""

    def __init__(self, directory: Path, manifest: Manifest, *, verify: bool = False, mmap: bool = False) -> None:
        self.directory, self.verify, self.mmap, self.sizes = directory, verify, mmap, manifest.shards
        self.entries: dict[str, list[Entry]] = {name: [] for name in manifest.shards}
        for entry in manifest.tensors.values():
            self.entries[entry.shard].append(entry)
        self.name = ""
        self.reader: SafetensorsReader | None = None
        with self:
            for name in self.entries:
                self._open(name)

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, *_: object) -> None:
        if self.reader is not None:
            self.reader.close()
        self.name, self.reader = "", None

    def read(self, entry: Entry, part: str) -> Tensor:
        key, described = entry.key(part), entry.parts[part]
        data = self._open(entry.shard).read_bytes(key)
        if self.verify and crc32(data.numpy().data) != described.crc32:
            raise CheckpointError(f"{self.directory / entry.shard}: the data of {key} is damaged. {AGAIN}")
        return from_bytes(data, described.dtype, described.shape)

    def _open(self, name: str) -> SafetensorsReader:
        if self.reader is None or name != self.name:
            self.__exit__()
            try:
                self.reader, self.name = SafetensorsReader(inside(self.directory, name), mapped=self.mmap), name
            except CheckpointError as error:
                now = manifest_text(self.directory)
                if not now or f'"{name}"' in now:
                    raise
                raise CheckpointError(
                    f"another checkpoint was saved to {self.directory} while this one was read: load it again"
                ) from error
            self._check(self.reader, self.sizes[name], self.entries[name])
        return self.reader

    def _check(self, reader: SafetensorsReader, size: int, entries: Iterable[Entry]) -> None:
        if reader.size != size:
            raise CheckpointError(
                f"{reader.path} has {reader.size} bytes, the manifest says {size}: it was truncated or changed. {AGAIN}"
            )
        for entry in entries:
            for name, part in entry.parts.items():
                span = reader.tensors.get(entry.key(name))
                if span is None:
                    raise CheckpointError(f"{reader.path} lacks {entry.key(name)}. {AGAIN}")
                expected = (TAGS[part.dtype], stored_shape(part.dtype, part.shape))
                if (span.tag, span.shape) != expected:
                    raise CheckpointError(
                        f"{reader.path}: {entry.key(name)} is {span.tag} {list(span.shape)}, the manifest says "
                        f"{expected[0]} {list(expected[1])}. {AGAIN}"
                    )
