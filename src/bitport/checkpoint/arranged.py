"""Tensors that a model names or splits differently than a checkpoint: experts that are separate in the checkpoint but
stacked in the model; gate and up projection that are separate but fused in the model; queries, keys and values that are
fused but separate in the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bitport.checkpoint.manifest import Entry, Manifest
from bitport.errors import CheckpointError
from bitport.tensor import QTensor
from bitport.tensor.combine import concatenated, stacked

Arrangement = Callable[[Manifest], Manifest]
"""Maps the manifest of a checkpoint to the same tensors under the names, and with the splits, of a model."""


@dataclasses.dataclass(frozen=True)
class Arranged(Entry):
    """A tensor that is built from others. ``parts`` is empty: nothing is stored under its own name."""

    pieces: tuple[tuple[Entry, ...], ...] = ()
    """Rows to stack, each of tensors to concatenate along their outputs."""
    stack: bool = False
    part: tuple[int, int] | None = None
    """(start, end) of the rows that it is of the result of the pieces; None: all of them."""
    flipped: bool = False
    """The result of the pieces is [.., K, N], and this tensor [.., N, K]."""

    @property
    def nbytes(self) -> int:
        every = [piece for row in self.pieces for piece in row]
        size = sum(piece.nbytes for piece in every)
        if self.part is None:
            return size
        start, end = self.part
        return size * (end - start) // sum(piece.shape[0] for piece in self.pieces[0])

    @property
    def source(self) -> str | None:
        """The name of the tensor that it is a renamed, split or transposed form of; None if it is made of several."""
        return self.pieces[0][0].name if not self.stack and len(self.pieces[0]) == 1 else None

    def made(self, read: Callable[[Entry], Tensor]) -> Tensor:
        """Build the tensor. ``read``: returns the tensor of an entry as stored in the file."""
        try:
            rows = [_beside([read(piece) for piece in row]) for row in self.pieces]
            quantized = [row for row in rows if isinstance(row, QTensor)]
            whole = rows[0] if not self.stack else stacked(quantized) if quantized else torch.stack(rows)
            part = whole if self.part is None else whole[slice(*self.part)]
            return part if not self.flipped else part.mT if quantized else part.mT.contiguous()
        except ValueError as error:
            raise CheckpointError(
                f"{self.name} cannot be made of {self.pieces[0][0].name} and others: {error}"
            ) from error


def _beside(tensors: Sequence[Tensor]) -> Tensor:
    quantized = [tensor for tensor in tensors if isinstance(tensor, QTensor)]
    if len(tensors) == 1:
        return tensors[0]
    return concatenated(quantized) if quantized else torch.cat([*tensors])


def arranged(
    name: str,
    pieces: Sequence[Sequence[Entry]],
    *,
    stack: bool = False,
    part: tuple[int, int] | None = None,
    flipped: bool = False,
) -> Arranged:
    """Build an Arranged from fields as described there. CheckpointError unless the pieces are compatible."""
    every = [piece for row in pieces for piece in row]
    first = every[0]
    for piece in every:
        if (piece.scheme, piece.dtype, piece.transposed) != (first.scheme, first.dtype, first.transposed):
            has = " and ".join(f"{each.name} is {each.scheme or each.dtype}" for each in (first, piece))
            raise CheckpointError(f"{name} is one tensor in the model, but {has}: give all of its pieces one scheme")
    shapes = [_joined([piece.shape for piece in row]) for row in pieces]
    if None in shapes or len(set(shapes)) > 1:
        raise CheckpointError(f"{name} cannot be made of pieces of shapes {[[*piece.shape] for piece in every]}")
    (inner,) = {shape for shape in shapes if shape is not None}
    shape = (len(pieces), *inner) if stack else inner
    if part is not None:
        start, end = part
        if not shape or not 0 <= start <= end <= shape[0]:
            raise CheckpointError(f"{name} cannot be the rows {start} to {end} of {first.name} {[*shape]}")
        shape = (end - start, *shape[1:])
    return Arranged(
        name,
        first.shard,
        first.dtype,
        (*shape[:-2], shape[-1], shape[-2]) if flipped else shape,
        {},
        first.scheme,
        first.transposed != flipped,
        first.buffer,
        tuple(map(tuple, pieces)),
        stack,
        part,
        flipped,
    )


def _joined(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The shape of the concatenated tensors; None if they are incompatible."""
    if len(shapes) == 1:
        return shapes[0]
    if not all(shapes) or len({shape[1:] for shape in shapes}) > 1:
        return None
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])
