"""Files in the user's cache folder, which threads, processes and containers may write at the same time."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def folder() -> Path:
    """Return the folder that BITPORT_CACHE names, else ``bitport`` in the user's cache folder. A user without a home,
    as one in a container that is only a number, has none: a path is returned at which nothing is, and nothing can be
    written."""
    if named := os.environ.get("BITPORT_CACHE"):
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bitport"
    except RuntimeError:
        return Path(os.devnull) / "bitport"


def write(file: Path, content: bytes) -> None:
    """Write the file atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_name(f"{file.name}.{secrets.token_hex(4)}.tmp")
    try:
        fresh.write_bytes(content)
        os.replace(fresh, file)
    finally:
        fresh.unlink(missing_ok=True)
