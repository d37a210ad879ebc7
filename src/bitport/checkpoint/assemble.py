"""Build the tensor that a manifest entry describes from its parts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from bitport.checkpoint.manifest import Entry
from bitport.errors import ArgumentError, CheckpointError
from bitport.tensor import from_parts
from bitport.tensor.qtensor import split_parts


def assembled(path: Path, entry: Entry, parts: Mapping[str, Tensor]) -> Tensor:
    """Return it in the layout of the file; CheckpointError, naming the file in ``path``, if the parts are invalid."""
    if entry.scheme is None:
        return parts[""]
    quantized, extra = split_parts(parts)
    try:
        return from_parts(
            quantized, entry.scheme, shape=entry.shape, dtype=entry.dtype, transposed=entry.transposed, **extra
        )
    except ArgumentError as error:
        raise CheckpointError(f"{path / entry.shard}: {entry.name} is not a valid {entry.scheme}: {error}") from error
