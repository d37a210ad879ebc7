"""Files in the user's cache folder, mostly measurements of ``bitport tune``. JSON that is damaged or from another
machine is ignored with a warning."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bitport.ops import Weight


def kind(weight: Weight) -> str:
    """What the speed depends on besides the size: number type, and whether scales are per row."""
    return kind_of(weight.dtype, weight.block_k >= weight.k)


def kind_of(dtype: str, whole_row: bool) -> str:
    return f"{dtype}/{'row' if whole_row else 'group'}"


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
    except (ValueError, RecursionError) as error:  # besides syntax: no UTF-8, a number of 4300 digits, deep nesting
        reason: str | None = f"it is no JSON ({error})"
    except OSError as error:
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
