"""Files in the user's cache folder, mostly measurements of ``bitport tune``. JSON that is damaged or from another
machine is ignored with a warning."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any


def folder() -> Path:
    """Return the folder that BITPORT_CACHE names, else ``bitport`` in the user's cache folder."""
    if named := os.environ.get("BITPORT_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bitport"


def read(file: Path, fault: Callable[[Any], str | None]) -> dict[str, Any] | None:
    """Return the content of the file; None if there is no file, or if ``fault`` gives a reason not to use it."""
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
    """Write the file atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        fresh.write_bytes(content)
        os.replace(fresh, file)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
