"""The version of bitport."""

from __future__ import annotations

import importlib.metadata


def library_version() -> str:
    """The installed version, or "source" if bitport runs from a source tree that is not installed."""
    try:
        return importlib.metadata.version("bitport")
    except importlib.metadata.PackageNotFoundError:
        return "source"
