"""Writing a GGUF file from a stream of tensors, all or nothing.

Settings and tensor entries precede the data (see header). The size of an entry only depends on the name of the tensor
and its number of dimensions, so that space can be reserved; type, shape and offset are written once all data are.
Tensors are stored in the order in which their data first arrive, without gaps, as llama.cpp requires.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from bitport.checkpoint.writer import sync_directory
from bitport.errors import ArgumentError, CheckpointError, remedy
from bitport.interop.gguf.header import ALIGNMENT, ARRAY, NUMBERS, REAL, SIGNED, TEXT, TRUTH, TYPES, WHOLE, nbytes_of

VERSION = 3
UNFINISHED = ".unfinished"
KINDS = {bool: TRUTH, int: WHOLE, float: REAL, str: TEXT}
NUMBER = {name: number for number, name in TYPES.items()}


class Output:
    """``with Output(path, settings, dimensions) as out: out.add(..); out.publish()``; without publish() nothing
    remains. ``settings``: numbers, strings, lists of either; ``dimensions``: name -> number of dimensions of the
    tensor."""

    def __init__(self, path: Path, settings: Mapping[str, Any], dimensions: Mapping[str, int]) -> None:
        self.path, self.unfinished = path, path.with_name(path.name + UNFINISHED)
        self.head = b"GGUF" + struct.pack("<IQQ", VERSION, len(dimensions), len(settings))
        self.head += b"".join(_text(key) + _value(value) for key, value in settings.items())
        room = sum(len(_entry(name, "F32", (1,) * count, 0)) for name, count in dimensions.items())
        self.start = self.end = _aligned(len(self.head) + room)
        self.dimensions = dimensions
        self.placed: dict[str, tuple[str, tuple[int, ...], int]] = {}
        """Name -> type, shape, offset in the file."""
        self.missing: dict[str, int] = {}
        """Name -> bytes still to be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = self.unfinished.open("xb")
        except FileExistsError as error:
            raise ArgumentError(
                f"{error.filename} is there already; if a run that ended early left it, remove it"
            ) from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written: {error}") from error

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # unflushed data are discarded with the file
            self.file.close()
        self.unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"writing {self.path} failed: {error}; {remedy(error)} or choose another directory"
            ) from error

    def add(self, name: str, kind: str, shape: tuple[int, ...], data: Tensor, part: int = 0) -> None:
        """``data``: the bytes of the tensor, or of the ``part``-th of its parts, which all have the same size."""
        if name not in self.placed:
            if len(shape) != self.dimensions[name]:
                raise CheckpointError(f"{name} has {self.dimensions[name]} dimensions, not {list(shape)}")
            self.placed[name] = kind, shape, self.end
            self.missing[name] = nbytes_of(kind, shape)
            self.end = _aligned(self.end + self.missing[name])
        there, known, start = self.placed[name]
        if (kind, shape) != (there, known):
            raise ArgumentError(
                f"{name} is one tensor of GGUF, of one type: {there} {list(known)}, and a part is {kind} {list(shape)}"
            )
        self.file.seek(start + part * data.nbytes)
        self.file.write(data.contiguous().numpy().data)
        self.missing[name] -= data.nbytes

    @property
    def nbytes(self) -> int:
        return sum(nbytes_of(kind, shape) for kind, shape, _ in self.placed.values())

    def publish(self) -> None:
        lost = [name for name in self.dimensions if self.missing.get(name, 1)]
        if lost:
            raise CheckpointError(f"{lost[0]} did not come in full")
        self.file.truncate(self.end)
        self.file.seek(0)
        entries = (_entry(name, *each[:2], each[2] - self.start) for name, each in self.placed.items())
        self.file.write(self.head + b"".join(entries))
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self.unfinished, self.path)
        sync_directory(self.path.parent)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _text(said: str) -> bytes:
    data = said.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """The value, preceded by its type. Integers in lists are signed, as for token types."""
    if not isinstance(value, list):
        kind = KINDS[type(value)]
        return struct.pack("<I", kind) + (_text(value) if kind == TEXT else struct.pack(f"<{NUMBERS[kind]}", value))
    kind = KINDS[type(value[0])] if value else TEXT
    kind = SIGNED if kind == WHOLE else kind
    each = map(_text, value) if kind == TEXT else [struct.pack(f"<{len(value)}{NUMBERS[kind]}", *value)]
    return struct.pack("<IIQ", ARRAY, kind, len(value)) + b"".join(each)


def _entry(name: str, kind: str, shape: tuple[int, ...], offset: int) -> bytes:
    count = len(shape)
    return _text(name) + struct.pack(f"<I{count}QIQ", count, *shape[::-1], NUMBER[kind], offset)
