"""Files in the user's cache folder, mostly what ``bitport tune`` measured: JSON, ignored with a warning where it is
damaged or of another machine."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any


def folder() -> Path:
    """BITPORT_CACHE, else the user's cache folder."""
    if named := os.environ.get("BITPORT_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bitport"


def read(file: Path, fault: Callable[[Any], str | None]) -> dict[str, Any] | None:
    """What the file holds, or None where there is none or ``fault`` says why it cannot be used."""
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (json.JSONDecodeError, RecursionError) as error:
        reason: str | None = f"it is no JSON ({error})"
    except (OSError, UnicodeDecodeError) as error:
        reason = str(error)
    else:
        reason = fault(content)
    if reason is None:
        return content
    warnings.warn(f"{file} is ignored: {reason}; run bitport tune to measure anew", stacklevel=2)
    return None


def write(file: Path, content: dict[str, Any]) -> None:
    write_bytes(file, json.dumps(content, indent=1).encode())


def write_bytes(file: Path, content: bytes) -> None:
    """Whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, fresh = tempfile.mkstemp(dir=file.parent, prefix=file.name, suffix=".tmp")
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)
    os.replace(fresh, file)
