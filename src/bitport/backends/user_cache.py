"""Files in the user's cache folder."""

from __future__ import annotations

import os
from pathlib import Path


def folder() -> Path:
    """Return the folder that BITPORT_CACHE names, else ``bitport`` in the user's cache folder."""
    if named := os.environ.get("BITPORT_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bitport"


def write(file: Path, content: bytes) -> None:
    """Write the file atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        fresh.write_bytes(content)
        os.replace(fresh, file)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
