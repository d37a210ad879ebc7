"""Fingerprint of the sources that the native kernels were compiled from: a library built from older sources would be
called by the current interface and give wrong numbers. ``setup.py`` runs this file too, without torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

FOLDERS = ("kernels", "torch", "shim")


def fingerprint(native: Path) -> str:
    """Hash of the sources and headers in ``native`` that are compiled when bitport is installed."""
    digest = hashlib.sha256()
    for folder in FOLDERS:
        for path in sorted(path for path in (native / folder).iterdir() if path.suffix in (".cpp", ".h")):
            content = path.read_bytes()
            digest.update(f"{folder}/{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
