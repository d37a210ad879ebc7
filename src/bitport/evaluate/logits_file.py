"""Logits of a text in a temporary file, so that two models can be compared without both being in memory.

They are stored bit for bit. The file is anonymous, so that nothing remains however the process ends.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitport.errors import ArgumentError
from bitport.report.text import size


def folder_of_logits(given: Path | None) -> Path:
    folder = Path(given or tempfile.gettempdir())
    if not folder.is_dir():
        raise ArgumentError(f"{folder} is not a folder; name an existing one for the logits of the original")
    return folder


class LogitsFile(contextlib.AbstractContextManager["LogitsFile"]):
    """``rows``: how many rows of logits will be written; ``folder``: where (default: the system's temporary folder)."""

    def __init__(self, rows: int, folder: Path | None = None) -> None:
        self.folder = folder_of_logits(folder)
        self.rows = rows
        self._file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115  (closed on exit)
        self._parts: list[tuple[torch.Size, torch.dtype]] = []

    def __exit__(self, *_: Any) -> None:
        self._file.close()

    @property
    def nbytes(self) -> int:
        """Final size of the file; known once the first rows are written."""
        shape, dtype = self._parts[0]
        return self.rows * shape[-1] * dtype.itemsize

    def write(self, logits: Tensor) -> None:
        """Append ``logits`` [t, vocabulary]; they are read in the same order."""
        self._parts.append((logits.shape, logits.dtype))
        if len(self._parts) == 1 and (free := shutil.disk_usage(self.folder).free) < self.nbytes:
            raise ArgumentError(
                f"the logits of the original take {size(self.nbytes)} for {self.rows} tokens, and {self.folder} has "
                f"{size(free)} left: take fewer tokens, or another folder"
            )
        self._file.write(logits.detach().cpu().contiguous().view(torch.uint8).numpy().data)

    def __iter__(self) -> Iterator[Tensor]:
        """Read back what was written, part by part, on the CPU."""
        self._file.seek(0)
        for shape, dtype in self._parts:
            held = bytearray(shape.numel() * dtype.itemsize)
            self._file.readinto(held)
            yield torch.frombuffer(held, dtype=dtype).reshape(shape)
