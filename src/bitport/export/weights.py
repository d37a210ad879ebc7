"""The weight file of a program: safetensors with aligned tensors that can be used in place.

The data and every tensor start at a multiple of ALIGNMENT bytes from the start of the file. safetensors allows no gaps,
so they are filled by byte tensors whose names start with PAD.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import IO

from torch import Tensor

from bitport.checkpoint.dtypes import READABLE, to_bytes
from bitport.checksum import crc32
from bitport.errors import ExportError

ALIGNMENT = 64
PAD = ".pad"
VERSION = 1
TAGS = {dtype: tag for tag, dtype in READABLE.items()}
"""Every dtype under its own tag, since a program uses its weights as they are stored."""
CHUNK = 1 << 24


class Written:
    """A file being written, with a running size and checksum."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.size, self.crc32 = file, 0, 0
        self.places: dict[str, int] = {}
        """Offset of each tensor in bytes from the start of the file."""
        self.header = {"size": 0, "crc32": 0}

    def write(self, data: bytes | memoryview) -> None:
        for start in range(0, len(data), CHUNK):
            part = data[start : start + CHUNK]
            self.file.write(part)
            self.crc32 = crc32(part, self.crc32)
        self.size += len(data)


def write_weights(file: IO[bytes], tensors: Mapping[str, Tensor]) -> Written:
    entries: dict[str, object] = {"__metadata__": {"format": "bitport-weights", "version": str(VERSION)}}
    for name, tag, shape, start, end in _placed(tensors):
        entries[name] = {"dtype": tag, "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    room = -(-(8 + len(header)) // ALIGNMENT) * ALIGNMENT - 8
    written = Written(file)
    written.write(room.to_bytes(8, "little") + header.ljust(room))
    written.header = {"size": written.size, "crc32": written.crc32}
    for name, tensor in tensors.items():
        data = to_bytes(tensor)
        written.places[name] = written.size
        written.write(data)
        written.write(bytes(-len(data) % ALIGNMENT))
    return written


def _placed(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str, list[int], int, int]]:
    start = pads = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in TAGS or name.startswith(PAD):
            raise ExportError(f"a weight file cannot hold {name!r} of {tensor.dtype}; it holds {', '.join(READABLE)}")
        end = start + tensor.numel() * tensor.element_size()
        yield name, TAGS[tensor.dtype], list(tensor.shape), start, end
        start = end + -end % ALIGNMENT
        if start != end:
            yield f"{PAD}{pads}", "U8", [start - end], end, start
            pads += 1
