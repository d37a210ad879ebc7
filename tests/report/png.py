"""Reader for the PNG files that a browser writes: 8 bits per channel, not interlaced."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

CHANNELS = {2: 3, 6: 4}


def read_png(path: Path) -> Tensor:
    """Return the pixels as uint8 [height, width, 3]."""
    data, at, packed, header = path.read_bytes(), 8, b"", b""
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        kind, content = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        header, packed = (content if kind == b"IHDR" else header), (packed + content if kind == b"IDAT" else packed)
        at += 12 + length
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", header)
    assert (depth, interlaced) == (8, 0)
    size = CHANNELS[colour]
    lines = zlib.decompress(packed)
    rows, above = [], bytes(width * size)
    for row in range(height):
        start = row * (width * size + 1)
        above = _unfiltered(lines[start], lines[start + 1 : start + 1 + width * size], above, size)
        rows.append(torch.frombuffer(bytearray(above), dtype=torch.uint8))
    return torch.stack(rows).reshape(height, width, size)[..., :3]


def _unfiltered(kind: int, line: bytes, above: bytes, size: int) -> bytes:
    out = bytearray(line)
    if kind == 0:
        return bytes(out)
    for at in range(len(out)):
        left, corner = (out[at - size], above[at - size]) if at >= size else (0, 0)
        guess = (left, above[at], (left + above[at]) // 2, _paeth(left, above[at], corner))[kind - 1]
        out[at] = (out[at] + guess) & 255
    return bytes(out)


def _paeth(left: int, up: int, corner: int) -> int:
    estimate = left + up - corner
    return min((left, up, corner), key=lambda near: abs(estimate - near))
