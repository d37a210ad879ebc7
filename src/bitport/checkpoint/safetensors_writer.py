"""Write a safetensors file tensor by tensor, as they arrive.

::

    8 bytes      ``room`` bytes                                              the data, without gaps
    room         {"name": {"dtype", "shape", "data_offsets"}, ...} spaces    ...

The header comes first but is known last. Room is reserved for it, and finish() writes it, padded with spaces as the
format allows; small data is moved up behind a header of the exact size instead. Until finish() the file starts with
zeros, so no reader accepts an incomplete one.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from bitport.checkpoint.dtypes import TAGS, stored_shape, to_bytes
from bitport.checkpoint.manifest import Part
from bitport.checksum import crc32
from bitport.errors import ArgumentError, CheckpointError

METADATA = "__metadata__"
"""The key of the header that is no tensor."""
ALIGNMENT = 64
"""The data starts at a multiple of this many bytes, so that mapped tensors are aligned for kernels."""
ROOM = 64 * 1024
MOVABLE = 16 * 1024 * 1024
"""Maximum size in bytes of data that is moved up at the end."""


class SafetensorsWriter:
    def __init__(self, path: Path, needed: int = 0, tags: Mapping[torch.dtype, str] = TAGS) -> None:
        """``needed``: bytes of header that the first tensors and the metadata for finish() require."""
        self.path, self.tags = path, tags
        self.entries: list[str] = []
        self.header_size, self.data_size = 2, 0
        self.room = _room(max(ROOM, needed + self.header_size))
        self.file = open(path, "x+b")  # noqa: SIM115  (closed by finish or abandon)
        self.file.write(bytes(8 + self.room))

    def holds(self, header: int) -> bool:
        """Whether ``header`` more bytes of header fit."""
        return self.header_size + header <= self.room

    def write(self, key: str, tensor: Tensor) -> Part:
        data = to_bytes(tensor)
        entry = _entry(key, tensor, self.tags, self.data_size, self.data_size + len(data))
        self.file.write(data)
        self.entries.append(entry)
        self.header_size += len(entry) + 1
        self.data_size += len(data)
        return Part(tensor.dtype, tuple(tensor.shape), crc32(data))

    def pause(self) -> None:
        """Close the file after all tensors are written; finish() opens it again."""
        self.file.close()

    def finish(self, metadata: dict[str, str] | None = None) -> int:
        """Write the header, flush everything to disk, and return the size of the file. ``metadata``: additional
        metadata for the header."""
        if self.file.closed:
            self.file = open(self.path, "r+b")  # noqa: SIM115
        more = [metadata_entry(metadata)] if metadata else []
        header = ("{" + ",".join(more + self.entries) + "}").encode()
        if self.data_size <= MOVABLE:
            self.file.seek(8 + self.room)
            data = self.file.read()
            self.room = _room(len(header))
            self.file.seek(8 + self.room)
            self.file.write(data)
            self.file.truncate()
        if len(header) > self.room:
            raise CheckpointError(
                f"{self.path}: its header takes {len(header)} bytes, and {self.room} were left for it"
            )
        self.file.seek(0)
        self.file.write(self.room.to_bytes(8, "little") + header.ljust(self.room))
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return 8 + self.room + self.data_size

    def abandon(self) -> None:
        with contextlib.suppress(OSError):  # unflushed data is discarded along with the file
            self.file.close()


def _room(header: int) -> int:
    return -(-(8 + header) // ALIGNMENT) * ALIGNMENT - 8


def header_bytes(key: str, tensor: Tensor, tags: Mapping[torch.dtype, str] = TAGS) -> int:
    """Upper bound of the header bytes that ``tensor`` takes."""
    return len(_entry(key, tensor, tags, 10**15, 10**15)) + 1


def metadata_entry(metadata: dict[str, str]) -> str:
    return f'"{METADATA}":{json.dumps(metadata)}'


def _entry(key: str, tensor: Tensor, tags: Mapping[torch.dtype, str], start: int, end: int) -> str:
    if key == METADATA:
        raise ArgumentError(f"a tensor cannot be called {key}: readers take it for the metadata of the file. Rename it")
    shape = list(stored_shape(tensor.dtype, tuple(tensor.shape)))
    described = {"dtype": tags[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
    return f"{json.dumps(key)}:{json.dumps(described, separators=(',', ':'))}"
