"""Validate arguments of public functions before any work is done: paths, sizes, dtypes, row counts, options."""

from __future__ import annotations

import math
import os
import re
import reprlib
from pathlib import Path

import torch

from bitport.errors import ArgumentError

UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def path_of(given: object, what: str) -> Path:
    """Return ``given`` as a path. "" is refused: Path takes it for the working directory, but it is usually an unset
    variable."""
    if not isinstance(given, (str, os.PathLike)) or not os.fspath(given):
        raise ArgumentError(f"{what} must be a path, as text or pathlib.Path, not {reprlib.repr(given)}")
    return Path(given)


def bytes_of(given: object, what: str) -> int:
    """Parse a number of bytes such as 1000000, "500 MB" (powers of 1000) or "4GiB" (powers of 1024)."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", str(given))
    nbytes = float(found[1]) * UNITS.get(found[2].lower(), 0) if found else 0
    if not 1 <= nbytes < 1 << 63:
        raise ArgumentError(f"{what} must be an amount of bytes, such as 4000000000, '4GB' or '500MiB', not {given!r}")
    return int(nbytes)


def floats_of(dtype: object, what: str) -> torch.dtype | None:
    """Return ``dtype`` if it is a floating-point dtype or None."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArgumentError(f"{what} must be a dtype of floats, such as torch.bfloat16, not {dtype!r}")
    return dtype


def check_options(given: object, **least: float) -> None:
    """Raise ArgumentError unless each named attribute of ``given`` is a finite number of at least the given minimum,
    and an integer if the minimum is one."""
    for name, lowest in least.items():
        value = getattr(given, name)
        whole = isinstance(lowest, int)
        if type(value) not in ((int,) if whole else (int, float)) or not lowest <= value < math.inf:
            raise ArgumentError(
                f"{type(given).__name__}({name}={value!r}): must be a {'whole ' if whole else ''}number of at least "
                f"{lowest:g}"
            )


def counts_of(rows: object) -> tuple[int, ...]:
    """Return a row count, or a sequence of them, as a tuple."""
    given = rows if isinstance(rows, (tuple, list, range)) else (rows,)
    if not all(type(count) is int and count >= 0 for count in given):
        raise ArgumentError(f"rows must be numbers of rows that an input has, such as 1 or (1, 64, 1024), not {rows!r}")
    return tuple(given)
