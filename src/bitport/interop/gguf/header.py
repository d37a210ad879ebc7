"""The header of a GGUF file. All numbers are little-endian; a string is its length in 8 bytes, then UTF-8::

    "GGUF" | version 4 | count of tensors 8 | count of settings 8
    settings:  key | type 4 | value                      an array is: type of its elements 4 | count 8 | elements
    tensors:   name | dimensions 4 | each 8, the innermost first | type 4 | offset 8
    data, which begins at a multiple of general.alignment (32), as every tensor does

The library ``gguf`` reads this, too, but makes an object per token of the vocabulary and trusts every count; here no
count causes allocations beyond the bytes that are in the file.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from reprlib import repr as short
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitport.checkpoint.safetensors_reader import check_regular, unfit
from bitport.errors import CheckpointError
from bitport.interop.gguf.blocks import BLOCKS, FLOATS

LONGEST = 1 << 26
"""The most bytes before the data: a vocabulary of 262144 tokens with its merges takes a fifth."""
VERSIONS = (2, 3)
ALIGNMENT = 32
BLOCK_VERSION = 2
"""general.quantization_version: of the block types, which were others in files before GGUF."""
DIMENSIONS = 5
"""ggml supports up to 4; convolutions of video models are written with 5."""
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type of a setting -> format character of struct."""
WHOLE, SIGNED, REAL, TRUTH, TEXT, ARRAY = 4, 5, 6, 7, 8, 9
"""Real numbers are read as the shortest decimal that rounds to the float32: 1e-05, as the model was configured with."""
TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
    42: "Q2_0",
    142: "PQ2_0",
}
"""Types of tensors, by their number in ggml."""


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    file: Path
    name: str
    type: str
    shape: tuple[int, ...]
    """Rows first, as in torch."""
    start: int
    nbytes: int

    @property
    def row(self) -> int:
        """Bytes per row."""
        return self.nbytes // math.prod(self.shape[:-1])

    def read(self) -> Tensor:
        """Read a float tensor, or uint8 [.., N, bytes of a row]."""
        raw = torch.empty(self.nbytes, dtype=torch.uint8)
        try:
            with self.file.open("rb") as file:
                file.seek(self.start)
                count = file.readinto(raw.numpy().data)
        except OSError as error:
            raise CheckpointError(f"{self.file} cannot be read: {error}") from error
        if count != self.nbytes:
            raise CheckpointError(f"{self.file} ends inside {self.name}; fetch it again")
        if self.type in FLOATS:
            return raw.view(FLOATS[self.type]).reshape(self.shape)
        return raw.reshape(*self.shape[:-1], self.row)


@dataclasses.dataclass(frozen=True)
class Header:
    settings: Mapping[str, Any]
    """Numbers, strings, and lists of either."""
    tensors: Mapping[str, GgufTensor]


def read_header(path: Path) -> Header:
    check_regular(path)
    try:
        with path.open("rb") as file:
            data, size = file.read(LONGEST), path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    try:
        return _parse(Cursor(data), path, size)
    except (struct.error, UnicodeDecodeError) as error:
        if size > LONGEST:
            raise CheckpointError(f"{path} has more than {LONGEST} bytes before its data, or is damaged") from error
        raise CheckpointError(f"{path} is cut off or damaged ({error}); fetch it again") from error


class Cursor:
    """Reads sequentially; raises struct.error at the end of the bytes."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise struct.error(f"{size} bytes at {self.at} of {len(self.data)}")
        self.at += size
        return self.data[self.at - size : self.at]

    def numbers(self, letter: str, count: int = 1) -> tuple[Any, ...]:
        each = struct.calcsize(f"<{letter}")
        return struct.unpack(f"<{count}{letter}", self.take(count * each))

    def text(self) -> str:
        return self.take(self.numbers("Q")[0]).decode()


def _parse(cursor: Cursor, path: Path, size: int) -> Header:
    if cursor.take(4) != b"GGUF":
        raise CheckpointError(f"{path} is no GGUF file")
    version, tensors, settings = (*cursor.numbers("I"), *cursor.numbers("Q", 2))
    if version not in VERSIONS:
        raise CheckpointError(
            f"{path} is of version {version} (or big-endian); {VERSIONS} are read: convert the model again"
        )
    said: dict[str, Any] = {}
    for _ in range(settings):
        key = cursor.text()
        if key in said:
            raise CheckpointError(f"{path} says {short(key)} twice; fetch it again")
        said[key] = _value(cursor, path, key)
    alignment = said.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20:
        raise CheckpointError(f"{path}: general.alignment is {short(alignment)}")
    if (blocks := said.get("general.quantization_version", BLOCK_VERSION)) != BLOCK_VERSION:
        raise CheckpointError(
            f"{path}: general.quantization_version is {short(blocks)}; {BLOCK_VERSION} is read: convert the model again"
        )
    entries = [_entry(cursor, path) for _ in range(tensors)]
    start = -(-cursor.at // alignment) * alignment
    return Header(said, dict(_placed(path, entries, start, size)))


def _value(cursor: Cursor, path: Path, key: str) -> Any:
    kind = cursor.numbers("I")[0]
    if kind == REAL:
        return shortest(cursor.numbers("f")[0])
    if kind in NUMBERS:
        return cursor.numbers(NUMBERS[kind])[0]
    if kind == TEXT:
        return cursor.text()
    if kind == ARRAY:
        kind, count = (*cursor.numbers("I"), *cursor.numbers("Q"))
        if kind in NUMBERS:
            return list(cursor.numbers(NUMBERS[kind], count))
        if kind == TEXT:
            return [cursor.text() for _ in range(count)]
    raise CheckpointError(f"{path}: {short(key)} is of the type {kind}, which GGUF does not have there")


def shortest(number: float) -> float:
    """See REAL."""
    return float(str(np.float32(number)))


def _entry(cursor: Cursor, path: Path) -> tuple[str, tuple[int, ...], int, int]:
    name, dimensions = cursor.text(), cursor.numbers("I")[0]
    if reason := unfit(name):
        raise CheckpointError(f"{path}: the name {short(name)} {reason}")
    if not 1 <= dimensions <= DIMENSIONS:
        raise CheckpointError(f"{path}: {short(name)} has {dimensions} dimensions; 1 to {DIMENSIONS} are read")
    shape = cursor.numbers("Q", dimensions)[::-1]
    return name, shape, cursor.numbers("I")[0], cursor.numbers("Q")[0]


def nbytes_of(kind: str, shape: tuple[int, ...]) -> int:
    block = BLOCKS.get(kind)
    elements, nbytes = (block.elements, block.nbytes) if block else (1, FLOATS[kind].itemsize)
    return math.prod(shape) // elements * nbytes


def _placed(
    path: Path, entries: list[tuple[str, tuple[int, ...], int, int]], start: int, size: int
) -> Iterator[tuple[str, GgufTensor]]:
    found: dict[str, GgufTensor] = {}
    for name, shape, number, offset in entries:
        kind = TYPES.get(number, f"number {number}")
        if kind not in FLOATS and kind not in BLOCKS:
            raise CheckpointError(
                f"{path}: {name} is of the type {kind}; {', '.join((*FLOATS, *BLOCKS))} are read. Take another file of "
                f"this model, such as Q4_K_M or Q8_0"
            )
        if name in found or 0 in shape or shape[-1] % (BLOCKS[kind].elements if kind in BLOCKS else 1):
            raise CheckpointError(f"{path}: {name} {list(shape)} is there twice, empty, or no whole blocks of {kind}")
        found[name] = GgufTensor(path, name, kind, shape, start + offset, nbytes_of(kind, shape))
    end = start
    for each in sorted(found.values(), key=lambda each: each.start):
        if each.start < end:
            raise CheckpointError(f"{path}: {each.name} overlaps another tensor; fetch it again")
        end = each.start + each.nbytes
        if end > size:
            raise CheckpointError(f"{path} ends before {each.name} does; fetch it again")
    yield from found.items()
