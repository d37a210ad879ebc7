"""Versions of installed packages."""

from __future__ import annotations

import importlib.metadata


def version(package: str) -> str | None:
    """The installed version of ``package``, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
