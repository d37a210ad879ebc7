"""Tensors that a model names or splits differently than a checkpoint: experts that are separate in the checkpoint but
stacked in the model; gate and up projection that are separate but fused in the model; queries, keys and values that are
fused but separate in the model; rows in another order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from reprlib import repr as short

import torch
from torch import Tensor

from bitport.checkpoint.manifest import Entry, Manifest
from bitport.errors import CheckpointError
from bitport.tensor import QTensor
from bitport.tensor.combine import concatenated, reordered, stacked

Arrangement = Callable[[Manifest], Manifest]
"""Maps the manifest of a checkpoint to the same tensors under the names, and with the splits, of a model."""


@dataclasses.dataclass(frozen=True)
class Arranged(Entry):
    """A tensor that is built from others. ``parts`` is empty: nothing is stored under its own name."""

    pieces: tuple[tuple[Entry, ...], ...] = ()
    """Rows to stack, each of tensors to concatenate along their outputs."""
    stack: bool = False
    axis: int = 0
    """The dimension of outputs in pieces: 1 if they are stacks of experts already."""
    part: Sequence[int] | None = None
    """The outputs of the result of the pieces that it has, in its order; a range if they follow each other. None: all
    of them."""
    flipped: bool = False
    """The result of the pieces is [.., K, N], and this tensor [.., N, K]."""

    @property
    def nbytes(self) -> int:
        every = [piece for row in self.pieces for piece in row]
        size = sum(piece.nbytes for piece in every)
        if self.part is None:
            return size
        return size * len(self.part) // sum(piece.shape[self.axis] for piece in self.pieces[0])

    @property
    def source(self) -> str | None:
        """The name of the tensor that it is a renamed, split or transposed form of; None if it is made of several."""
        return self.pieces[0][0].name if not self.stack and len(self.pieces[0]) == 1 else None

    def made(self, read: Callable[[Entry], Tensor]) -> Tensor:
        """Build the tensor. ``read``: returns the tensor of an entry as stored in the file."""
        try:
            rows = [_beside([read(piece) for piece in row], self.axis) for row in self.pieces]
            quantized = [row for row in rows if isinstance(row, QTensor)]
            whole = rows[0] if not self.stack else stacked(quantized) if quantized else torch.stack(rows)
            part = whole if self.part is None else _taken(whole, self.part, self.axis)
            return part if not self.flipped else part.mT if quantized else part.mT.contiguous()
        except ValueError as error:
            raise CheckpointError(
                f"{self.name} cannot be made of {self.pieces[0][0].name} and others: {error}"
            ) from error


def _beside(tensors: Sequence[Tensor], axis: int) -> Tensor:
    quantized = [tensor for tensor in tensors if isinstance(tensor, QTensor)]
    if len(tensors) == 1:
        return tensors[0]
    return concatenated(quantized) if quantized else torch.cat([*tensors], axis)


def _taken(whole: Tensor, part: Sequence[int], axis: int) -> Tensor:
    if isinstance(part, range):
        taken = whole[(slice(None),) * axis + (slice(part.start, part.stop),)]
        return taken if isinstance(whole, QTensor) else taken.contiguous()
    order = torch.tensor(part, device=whole.device)
    return reordered(whole, order, axis) if isinstance(whole, QTensor) else whole.index_select(axis, order)


def arranged(
    name: str,
    pieces: Sequence[Sequence[Entry]],
    *,
    stack: bool = False,
    axis: int = 0,
    part: Sequence[int] | None = None,
    flipped: bool = False,
) -> Arranged:
    """Build an Arranged from fields as described there. CheckpointError unless the pieces are compatible."""
    every = [piece for row in pieces for piece in row]
    first = every[0]
    for piece in every:
        if (piece.scheme, piece.dtype, piece.transposed) != (first.scheme, first.dtype, first.transposed):
            has = " and ".join(f"{each.name} is {each.scheme or each.dtype}" for each in (first, piece))
            raise CheckpointError(f"{name} is one tensor in the model, but {has}: give all of its pieces one scheme")
    shapes = [_joined([piece.shape for piece in row], axis) for row in pieces]
    if None in shapes or len(set(shapes)) > 1:
        raise CheckpointError(f"{name} cannot be made of pieces of shapes {[[*piece.shape] for piece in every]}")
    (inner,) = {shape for shape in shapes if shape is not None}
    shape = (len(pieces), *inner) if stack else inner
    if part is not None:
        if len(shape) <= axis or not all(0 <= row < shape[axis] for row in part):
            raise CheckpointError(f"{name} cannot be the rows {short(part)} of {first.name} {[*shape]}")
        shape = (*shape[:axis], len(part), *shape[axis + 1 :])
    return Arranged(
        name,
        first.shard,
        first.dtype,
        (*shape[:-2], shape[-1], shape[-2]) if flipped else shape,
        parts={},
        scheme=first.scheme,
        transposed=first.transposed != flipped,
        buffer=first.buffer,
        pieces=tuple(map(tuple, pieces)),
        stack=stack,
        axis=axis,
        part=part,
        flipped=flipped,
    )


def _joined(shapes: Sequence[tuple[int, ...]], axis: int) -> tuple[int, ...] | None:
    """The shape of the tensors, concatenated along ``axis``; None if they are incompatible."""
    if len(shapes) == 1:
        return shapes[0]
    if not all(len(shape) > axis for shape in shapes) or len({(*sh[:axis], *sh[axis + 1 :]) for sh in shapes}) > 1:
        return None
    return (*shapes[0][:axis], sum(shape[axis] for shape in shapes), *shapes[0][axis + 1 :])
