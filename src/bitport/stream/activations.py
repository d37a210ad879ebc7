"""Activations on disk: one safetensors file per step and batch."""

from __future__ import annotations

import zlib
from pathlib import Path

from bitport.calibrate.store import Tensors
from bitport.checkpoint.safetensors_reader import SafetensorsReader
from bitport.checkpoint.safetensors_writer import SafetensorsWriter
from bitport.errors import CheckpointError


class Disk:
    """An incomplete file is not a valid safetensors file; files of a step that the journal marks as done are
    complete."""

    def __init__(self, folder: Path, batches: int, label: str = "") -> None:
        """``label``: part of the file names that distinguishes processes."""
        self.folder, self.batches, self.label = folder, batches, label

    def put(self, step: str, batch: int, tensors: Tensors) -> None:
        path = self._path(step, batch)
        try:
            path.unlink(missing_ok=True)
            file = SafetensorsWriter(path)
            for at, tensor in tensors.items():
                file.write(str(at), tensor)
            file.finish()
        except OSError as error:
            raise CheckpointError(
                f"activations cannot be written to {self.folder}: {error}. Free some space or keep them in memory, "
                "then resume"
            ) from error

    def get(self, step: str, batch: int) -> Tensors:
        with SafetensorsReader(self._path(step, batch)) as file:
            return {int(at): file.read(at) for at in file.tensors}

    def drop(self, step: str) -> None:
        for batch in range(self.batches):
            self._path(step, batch).unlink(missing_ok=True)

    def holds(self, step: str) -> bool:
        return all(self._path(step, batch).is_file() for batch in range(self.batches))

    def _path(self, step: str, batch: int) -> Path:
        return self.folder / f"activations-{zlib.crc32(step.encode()):08x}-{self.label}{batch:06}.safetensors"
