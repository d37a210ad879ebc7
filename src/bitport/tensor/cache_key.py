"""Cache key for torch.compile, whose cache outlives the process and holds graphs with bitport's code in them."""

from __future__ import annotations

import functools
import zlib
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


@functools.cache
def source_key() -> int:
    """Checksum of bitport's Python sources."""
    return zlib.crc32(b"".join(file.read_bytes() for file in sorted(PACKAGE.rglob("*.py"))))
