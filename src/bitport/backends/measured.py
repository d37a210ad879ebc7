"""The measurements of ``bitport tune``: what they are taken for, and the JSON files that hold them. One that is damaged
or from another machine is ignored with a warning."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bitport.backends import user_cache
from bitport.errors import ArgumentError
from bitport.ops import Weight


def kind(weight: Weight) -> str:
    """What the speed depends on besides the size: number type, and whether scales are per row."""
    return kind_of(weight.dtype, weight.block_k >= weight.k)


def kind_of(dtype: str, whole_row: bool) -> str:
    return f"{dtype}/{'row' if whole_row else 'group'}"


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


def check_kept() -> None:
    """ArgumentError unless the folder of files can be written: to be asked before minutes of measuring."""
    trial = user_cache.folder() / "trial"
    try:
        user_cache.write(trial, b"")
        trial.unlink(missing_ok=True)  # another process may try at the same time
    except OSError as error:
        raise ArgumentError(
            f"what is measured cannot be kept ({error}): name a folder that can be written in BITPORT_CACHE"
        ) from error


def write(file: Path, content: dict[str, Any]) -> None:
    user_cache.write(file, json.dumps(content, indent=1).encode())
