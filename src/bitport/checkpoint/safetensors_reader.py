"""Read a safetensors file tensor by tensor, into separate memory or as views of the mapped file.

A view costs nothing until it is accessed, and its pages are shared between processes; but truncating a mapped file
kills the process that uses it, and a tensor at an unaligned address must be copied because it cannot be viewed as its
dtype. Nothing in the header is trusted before it has been checked against the size of the file.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from bitport.checkpoint.dtypes import READABLE, countable, from_bytes
from bitport.errors import CheckpointError
from bitport.json_text import unique

LONGEST = 1000
"""Characters of a tensor's name. Patterns are searched in names, some of which take the square of that in time."""


class Span(NamedTuple):
    """A tensor as described by the header; ``start``, ``end``: byte offsets in the file."""

    tag: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def dtype(self) -> torch.dtype:
        return READABLE[self.tag]


DIMENSIONS = 64
"""Maximum number of dimensions, as in torch; the product of many thousands would be slow to compute."""
ALIGNED = 16
"""Bytes: the size of the largest element (complex128)."""
HEADER = 100_000_000
"""Maximum size of a header in bytes, as in the safetensors library."""


def check_regular(path: Path) -> None:
    """CheckpointError if ``path`` exists and is not a regular file: opening a pipe would block until someone writes."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is not a regular file; give one")


def named(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """:func:`unique`, whose keys are names of tensors: ValueError for one as of :func:`unfit`."""
    found = unique(pairs)
    for key in found:
        if reason := unfit(key):
            raise ValueError(f"the key {reprlib.repr(key)} {reason}")
    return found


def unfit(name: str) -> str | None:
    """Why ``name`` cannot be that of a tensor, or None: it could not be encoded, would control the terminal that shows
    it, or has more than LONGEST characters."""
    if len(name) > LONGEST:
        return f"has {len(name)} characters; names of at most {LONGEST} are read"
    return None if name.isprintable() else "has characters that cannot be shown"


def _mapped(path: Path, size: int) -> Tensor:
    """The bytes of ``path``, mapped privately: writes stay in memory. By way of DLPack, since PyTorch takes whatever
    from_file has mapped for memory that is shared between processes, and does not share it when it is asked to."""
    try:
        return torch.from_dlpack(torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8))
    except RuntimeError as error:
        raise CheckpointError(
            f"PyTorch cannot map {path} into memory ({error}): its whole name has to be UTF-8, and it has to lie where "
            "files can be mapped"
        ) from error


class SafetensorsReader:
    def __init__(
        self, path: Path, *, mapped: bool = False, start: int = 0, size: int | None = None, any_dtype: bool = False
    ) -> None:
        """``start``, ``size``: the part of ``path`` that is the safetensors file, if it is embedded. ``any_dtype``:
        also list tensors of dtypes that cannot be read."""
        self.path, self.start, self.any_dtype = path, start, any_dtype
        self.metadata: dict[str, str] = {}
        """The metadata of the header."""
        self.mapped: Tensor | None = None
        check_regular(path)
        try:
            self.file = open(path, "rb")  # noqa: SIM115  (closed by close)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error}") from error
        try:
            whole = os.fstat(self.file.fileno()).st_size
            self.size = whole - start if size is None else size
            if not 0 <= start <= start + self.size <= whole:
                self._fail(f"{self.size} bytes from {start} on are not within its {whole} bytes")
            self.tensors = dict(self._spans())
            if mapped:
                self.mapped = _mapped(path, whole)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.file.close()

    def read(self, name: str) -> Tensor:
        span = self.tensors[name]
        return from_bytes(self.read_bytes(name), span.dtype, span.shape)

    def read_bytes(self, name: str) -> Tensor:
        """The bytes of ``name`` as a flat uint8 tensor."""
        span = self.tensors[name]
        if self.mapped is not None:
            data = self.mapped[span.start : span.end]
            return data if span.start % ALIGNED == 0 else data.clone()
        data = torch.empty(span.end - span.start, dtype=torch.uint8, device="cpu")
        try:
            self.file.seek(span.start)
            got = self.file.readinto(data.numpy().data) if data.numel() else 0
        except OSError as error:
            raise CheckpointError(f"{self.path}: {name} cannot be read: {error}") from error
        if got != data.numel():
            self._fail(f"it ends inside {name}")
        return data

    def _fail(self, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.path} is not a whole safetensors file: {problem}. Fetch or save it again")

    def _spans(self) -> list[tuple[str, Span]]:
        """The tensors in the order of their data."""
        self.file.seek(self.start)
        length = int.from_bytes(self.file.read(8), "little")
        if not 2 <= length <= self.size - 8:
            self._fail(f"its header of {length} bytes does not fit into its {self.size} bytes")
        if length > HEADER:
            self._fail(f"its header of {length} bytes is too long; at most {HEADER} are allowed")
        try:
            header = json.loads(self.file.read(length), object_pairs_hook=named)
        except (ValueError, RecursionError) as error:
            self._fail(f"its header is not JSON ({error})")
        if not isinstance(header, dict):
            self._fail("its header is not an object")
        said = header.pop("__metadata__", None)
        if isinstance(said, dict):
            self.metadata = {key: value for key, value in said.items() if isinstance(value, str)}
        spans = [(name, self._span(name, entry, 8 + length)) for name, entry in header.items()]
        spans.sort(key=lambda named: (named[1].start, named[1].end))
        data = at = self.start + 8 + length
        for name, span in spans:  # two tensors of the same bytes would be changed together
            if span.start != at:
                self._fail(
                    f"{reprlib.repr(name)} starts at byte {span.start - data} of its data, and the tensor before it "
                    f"ends at byte {at - data}: tensors must follow each other without gaps or overlaps"
                )
            at = span.end
        if at != self.start + self.size:
            self._fail(f"its last tensor ends at byte {at - data} of its data, which has {self.size - 8 - length}")
        return spans

    def _span(self, name: str, entry: Any, offset: int) -> Span:
        try:
            tag, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            counts = [*shape, start, end]
            if not (isinstance(shape, list) and all(type(count) is int and 0 <= count < 2**48 for count in counts)):
                raise TypeError("sizes must be whole numbers below 2^48")
            if len(shape) > DIMENSIONS or not countable(shape):
                raise ValueError(f"a tensor has at most {DIMENSIONS} dimensions, and below 2^63 elements")
        except (TypeError, KeyError, ValueError) as error:
            self._fail(f"{reprlib.repr(name)} is described by {reprlib.repr(entry)} ({error})")
        if not isinstance(tag, str) or not (self.any_dtype or tag in READABLE):
            raise CheckpointError(
                f"{self.path}: {reprlib.repr(name)} has the dtype {reprlib.repr(tag)}; known are {', '.join(READABLE)}"
            )
        nbytes = math.prod(shape) * READABLE[tag].itemsize if tag in READABLE else end - start
        if not start <= end <= self.size - offset or end - start != nbytes:
            self._fail(
                f"{reprlib.repr(name)}, {tag} {reprlib.repr(shape)}, cannot be bytes {start} to {end} of its data"
            )
        return Span(tag, tuple(shape), self.start + offset + start, self.start + offset + end)
