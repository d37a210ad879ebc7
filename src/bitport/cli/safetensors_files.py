"""List the tensors of plain safetensors files from their headers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from bitport.checkpoint.safetensors_reader import SafetensorsReader
from bitport.checkpoint.source import INDEXES, Source
from bitport.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class Stored:
    name: str
    kind: str
    """The scheme, or the dtype of an unquantized tensor: in files of others its tag, BF16, F8_E4M3, F4, ..."""
    shape: tuple[int, ...]
    nbytes: int
    file: str


def stored_tensors(path: Path) -> list[Stored]:
    """The tensors of one file, or of all safetensors files of a directory."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if path.suffix == ".gguf":
        raise CheckpointError(f"{path} is no safetensors file; bitport convert {path} -o DIR makes a directory of it")
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or any((path / name).is_file() for name in INDEXES):
        Source(path, quantized=True)  # raises if files are missing
    return [tensor for file in files for tensor in _of_file(file)]


def _of_file(path: Path) -> list[Stored]:
    with SafetensorsReader(path, any_dtype=True) as file:
        return [
            Stored(name, span.tag, span.shape, span.end - span.start, path.name) for name, span in file.tensors.items()
        ]
