"""List the tensors of plain safetensors files from their headers."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

from bitport.checkpoint.safetensors_reader import check_regular
from bitport.checkpoint.source import INDEXES, Source
from bitport.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class Stored:
    name: str
    kind: str
    """The scheme, or the dtype of an unquantized tensor."""
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
    check_regular(path)
    try:
        with safe_open(str(path), "pt") as file:
            views = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            return [_stored(name, view.get_dtype(), tuple(view.get_shape()), path.name) for name, view in views.items()]
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error


def _stored(name: str, tag: str, shape: tuple[int, ...], file: str) -> Stored:
    """``tag``: BF16, F8_E4M3, BOOL ...; its first number is the number of bits per element."""
    bits = re.search(r"\d+", tag)
    return Stored(name, tag, shape, math.prod(shape) * int(bits.group() if bits else 8) // 8, file)
