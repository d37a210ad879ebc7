"""Kernels that a backend has but cannot register here: a library that was not compiled, a package that is not there."""

from __future__ import annotations

import dataclasses
import warnings


@dataclasses.dataclass(frozen=True)
class Missing:
    """The kernels called ``name`` of ``ops`` for devices of type ``device``, with the priority that they would have."""

    name: str
    device: str
    ops: tuple[str, ...]
    reason: str
    """Why they are missing and, if anything helps, what to do."""
    priority: int = 0
    curable: bool = True
    """Whether something helps: then the first quantized weight on such a device warns."""


MISSING: list[Missing] = []
"""What backends have reported, in that order."""
_warned: set[Missing] = set()


def register_missing(missing: Missing) -> None:
    """Report kernels that do not exist here, so that nobody wonders why others run in their place."""
    MISSING.append(missing)


def missing_for(op: str, device: str) -> list[Missing]:
    """The kernels of ``op`` that are missing on devices of type ``device``."""
    return [each for each in MISSING if each.device == device and op in each.ops]


def warn_of_missing(device: str) -> None:
    """Warn, once in a process, of each kind of kernels that the user could bring to devices of this type."""
    for each in MISSING:
        if each.device == device and each.curable and each not in _warned:
            _warned.add(each)
            warnings.warn(
                f"bitport's {each.name} kernels for {device} are missing, and without them quantized weights may be "
                f"many times slower: {each.reason}",
                stacklevel=2,
            )
