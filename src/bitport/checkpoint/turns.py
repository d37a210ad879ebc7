"""Several writers of one directory, as when every process of a training run saves: each becomes its checkpoint in turn,
and the last one stays, whole.

Removed is what the manifest named that was replaced, and no file that another writer may still be at.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from bitport.checkpoint.manifest import NAME

if sys.platform != "win32":
    import fcntl

OURS = re.compile(r"model-[0-9a-f]{8}-\d{5,}\.safetensors|\.bitport-[0-9a-f]{8}-.*")
"""Names that only a Writer gives: shards, and files that have not got their names yet."""
ABANDONED = 24 * 60 * 60
"""Seconds: what is so much older than a new manifest, and named by none, was left by a process that was killed."""


@contextlib.contextmanager
def turn(directory: Path) -> Iterator[None]:
    """Others that take a turn in ``directory`` wait. Where a system or its file system has no such locks (Windows, some
    network file systems) nobody waits: then the checkpoint is whole too, but the files beside it may be another's."""
    if sys.platform == "win32":
        yield
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def manifest_text(directory: Path) -> str:
    """Of a manifest that may be damaged, or not be there."""
    path = directory / NAME
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def clear(directory: Path, kept: Collection[str], replaced: str) -> None:
    """Remove what no checkpoint needs after a new manifest, which names the shards ``kept``, took the place of one with
    the text ``replaced``."""
    oldest = (directory / NAME).stat().st_mtime - ABANDONED
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):
            ours = OURS.fullmatch(path.name) and path.name not in kept
            if ours and (f'"{path.name}"' in replaced or path.stat().st_mtime < oldest):
                path.unlink()
