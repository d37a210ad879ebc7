"""The exceptions bitport raises. Each message says what was given, what is allowed, and what to do."""

import errno
from collections.abc import Collection, Iterable, Mapping

__all__ = [
    "ArgumentError",
    "BackendError",
    "BitportError",
    "CheckpointError",
    "DeviceError",
    "ExportError",
    "KernelError",
    "LayoutError",
    "RecipeError",
    "SchemeError",
    "UnsupportedError",
]


def shortened(names: Iterable[str], limit: int = 10) -> str:
    """Join at most ``limit`` names for an error message."""
    every = list(names)
    return ", ".join(every[:limit]) + (f" and {len(every) - limit} more" if len(every) > limit else "")


def counted(found: Mapping[str, Collection[str]], limit: int = 10) -> str:
    """What is wrong with how many names, and at most ``limit`` of them, for each kind that has some."""
    return "; ".join(f"{len(names)} {what}: {shortened(names, limit)}" for what, names in found.items() if names)


LONGEST = 1500
"""Characters of an error that may quote a value of a file, of any length."""


def cut(text: str) -> str:
    """``text`` up to LONGEST characters."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def remedy(error: OSError) -> str:
    """What to do about a file that could not be written."""
    return "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "mend that"


class BitportError(Exception):
    """Base class of all bitport exceptions."""


class ArgumentError(BitportError, ValueError):
    """A tensor or value that an operation does not accept (dtype, shape, device, range)."""


class SchemeError(BitportError, ValueError):
    """A scheme or preset name that does not exist, contradicts itself, or comes from a newer version."""


class RecipeError(BitportError, ValueError):
    """A recipe whose rules do not fit the model: a rule that matches nothing, or tied weights in conflict."""


class LayoutError(BitportError, ValueError):
    """A layout that does not exist, or that cannot hold the given tensor."""


class KernelError(BitportError, RuntimeError):
    """A kernel that was requested by name but cannot run this call."""


class DeviceError(BitportError, RuntimeError):
    """A device that cannot hold or compute a scheme."""


class BackendError(BitportError, ImportError):
    """A backend, built in or from an installed package, that cannot be loaded."""


class CheckpointError(BitportError, RuntimeError):
    """A checkpoint that is missing, damaged, malicious, or from a newer version."""


class ExportError(BitportError, RuntimeError):
    """An exported program that cannot be written or loaded: a dependency is missing, or its package is damaged."""


class UnsupportedError(BitportError, NotImplementedError):
    """An operation that is not defined on quantized tensors."""
