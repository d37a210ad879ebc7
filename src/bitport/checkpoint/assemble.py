"""Build the tensor that a manifest entry describes from its parts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from bitport.checkpoint.manifest import Entry
from bitport.errors import ArgumentError, CheckpointError
from bitport.numerics import Quantized
from bitport.tensor import from_parts


def assembled(path: Path, entry: Entry, parts: Mapping[str, Tensor]) -> Tensor:
    """Return it in the layout of the file; CheckpointError, naming the file in ``path``, if the parts are invalid."""
    if entry.scheme is None:
        return parts[""]
    try:
        return from_parts(
            Quantized(parts["qdata"], parts["scale"], parts.get("zero"), parts.get("scale2")),
            entry.scheme,
            shape=entry.shape,
            dtype=entry.dtype,
            transposed=entry.transposed,
            perm=parts.get("perm"),
            pre_scale=parts.get("pre_scale"),
            act_scale=parts.get("act_scale"),
        )
    except ArgumentError as error:
        raise CheckpointError(f"{path / entry.shard}: {entry.name} is not a valid {entry.scheme}: {error}") from error
