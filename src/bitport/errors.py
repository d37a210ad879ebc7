"""The errors bitport raises. Each message says what was given, what is allowed, and what to do."""

from collections.abc import Iterable

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
]


def shortened(names: Iterable[str], limit: int = 10) -> str:
    """Some of ``names``, for a message."""
    every = list(names)
    return ", ".join(every[:limit]) + (f" and {len(every) - limit} more" if len(every) > limit else "")


class BitportError(Exception):
    """Base of every error raised on purpose."""


class ArgumentError(BitportError, ValueError):
    """A tensor or value that an operation cannot take (dtype, shape, device, range)."""


class SchemeError(BitportError, ValueError):
    """A scheme or preset name that does not exist, contradicts itself, or comes from a newer version."""


class RecipeError(BitportError, ValueError):
    """A recipe whose rules do not fit the model: a rule that matches nothing, or tied weights in conflict."""


class LayoutError(BitportError, ValueError):
    """A layout that does not exist, or that cannot hold the given tensor."""


class KernelError(BitportError, RuntimeError):
    """A kernel that was asked for by name and cannot run this call."""


class DeviceError(BitportError, RuntimeError):
    """A device that cannot hold or compute a scheme."""


class BackendError(BitportError, ImportError):
    """A backend, of bitport or of an installed package, that cannot be loaded."""


class CheckpointError(BitportError, RuntimeError):
    """A checkpoint that is missing, damaged, hostile, or from a newer version."""


class ExportError(BitportError, RuntimeError):
    """A program that cannot be made or loaded: what it would need is missing, or its package is damaged."""
