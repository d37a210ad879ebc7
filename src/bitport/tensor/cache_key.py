"""For torch.compile's cache, which outlives the process: the graphs that it keeps have bitport's code in them."""

from __future__ import annotations

import functools
import zlib
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


@functools.cache
def source_key() -> int:
    """Another one for another bitport."""
    return zlib.crc32(b"".join(file.read_bytes() for file in sorted(PACKAGE.rglob("*.py"))))
