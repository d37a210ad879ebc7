"""Coordinate several writers of one directory, as when every process of a training run saves: each publishes its
checkpoint in turn, and the last one remains, intact. A checkpoint that is written in steps is one run's alone.

Only files that the replaced manifest named are removed, and none that another writer may still be working on.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from bitport.checkpoint.manifest import NAME
from bitport.errors import ArgumentError

if sys.platform != "win32":
    import fcntl

OURS = re.compile(r"model-[0-9a-f]{8}-\d{5,}\.safetensors|\.bitport-[0-9a-f]{8}-.*")
"""Names that only a Writer creates: shards, and files that are not renamed yet."""
ABANDONED = 24 * 60 * 60
"""Seconds: a file this much older than the new manifest, which does not name it, was left by a killed process."""


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock ``directory`` against other writers. On systems or file systems without such locks (Windows, some network
    file systems) nobody waits: the checkpoint is still intact, but the files beside it may belong to another."""
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


def hold(folder: Path, run: object) -> Callable[[], object]:
    """Keep other runs, of this process too, out of the folder of an unfinished checkpoint, until the result is called,
    or ``run`` or the process is gone: two that continue it, or one that discards it, would remove files that are being
    written. ArgumentError if another run holds it. Where :func:`locked` cannot lock, nobody is kept out."""
    if sys.platform == "win32":
        return lambda: None
    handle = os.open(folder, os.O_RDONLY)
    let_go = weakref.finalize(run, os.close, handle)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        let_go()
        raise ArgumentError(
            f"{folder} is being written by another run, of this process or another: wait until that has ended, or give "
            f"another directory"
        ) from None
    except OSError:
        pass
    return let_go


def manifest_text(directory: Path) -> str:
    """The text of the manifest, which may be damaged; "" if there is none."""
    path = directory / NAME
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def clear(directory: Path, kept: Collection[str], replaced: str) -> None:
    """Remove files that no checkpoint needs after a new manifest, which names the shards ``kept``, has replaced one
    with the text ``replaced``. Windows refuses that for a file that is still mapped, as by a model loaded from it: such
    a shard stays until a later save finds it abandoned."""
    oldest = (directory / NAME).stat().st_mtime - ABANDONED
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError, PermissionError):
            ours = OURS.fullmatch(path.name) and path.name not in kept
            if ours and (f'"{path.name}"' in replaced or path.stat().st_mtime < oldest):
                path.unlink()
