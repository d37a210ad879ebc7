"""The installed versions of bitport and of other packages."""

from __future__ import annotations

import importlib.metadata


def library_version() -> str:
    """The installed version, or "source" if bitport runs from a source tree that is not installed."""
    return installed_version("bitport") or "source"


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
