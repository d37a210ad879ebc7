"""Combine quantized matrices exactly: stack them, as experts are, concatenate them along their outputs, or bring these
into another order. Where several rows share a scale and would not do so afterwards, each gets its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bitport.errors import ArgumentError
from bitport.numerics import Quantized
from bitport.numerics.packing import as_bytes
from bitport.tensor.borders import axis_of, cut_along, is_conv, matrix_like
from bitport.tensor.forms import with_row_scales, without_global
from bitport.tensor.join import join
from bitport.tensor.qtensor import EXTRA, PARTS, QTensor


def stacked(pieces: Sequence[QTensor]) -> QTensor:
    """Stack E matrices [N, K] into [E, N, K], in the plain layout."""
    plain = [piece.to_layout("plain") for piece in pieces]
    first = plain[0]
    for piece in plain:
        same = [(q.scheme, q.transposed, q.dtype, q.batched, tuple(q.shape)) for q in (piece, first)]
        if same[0] != same[1] or piece.batched or piece.repeated:
            raise ArgumentError(f"{first!r} and {piece!r} cannot be stacked: they are not alike")
    data, scale, *rest = (
        None if parts[0] is None else torch.stack([as_bytes(part) for part in parts]).view(parts[0].dtype)
        for parts in zip(*(piece.parts for piece in plain), strict=True)
    )
    assert data is not None
    assert scale is not None
    shared = {name: _shared(plain, name) for name in EXTRA}
    return first.replace(Quantized(data, scale, *rest), shape=(len(plain), *first.shape), **shared)


def concatenated(pieces: Sequence[QTensor]) -> QTensor:
    """Concatenate [.., N1, K], [.., N2, K] .. in the plain layout into [.., N1 + N2 + .., K]; convolutions on dim 0."""
    plain = [piece.to_layout("plain") for piece in pieces]
    block = plain[0].scheme.weight.block[0]
    apart = block == 0 or any(piece.matrix.n % block for piece in plain[:-1])
    plain = [without_global(with_row_scales(piece) if apart else piece) for piece in plain]
    outputs = 0 if is_conv(plain[0]) else -1 if plain[0].transposed else -2
    return join(plain, outputs)


def reordered(q: QTensor, order: Tensor, dim: int) -> QTensor:
    """The outputs ``order`` of ``q``, along ``dim``, in the plain layout."""
    plain = q.to_layout("plain")
    if axis_of(plain, dim) != "n":
        raise ArgumentError(f"dimension {dim} of {q!r} is not that of its outputs, which alone can change their order")
    if plain.scheme.weight.block[0] > 1:
        plain = with_row_scales(plain)
    cut = cut_along(plain, dim)

    def ordered(name: str) -> Tensor | None:
        part = getattr(plain, name)
        return part if name not in cut else as_bytes(part).index_select(cut[name], order).view(part.dtype)

    shape = [*plain.shape]
    shape[dim] = len(order)
    parts = {name: ordered(name) for name in PARTS}
    return plain.with_parts(parts, shape=tuple(shape), matrix=matrix_like(plain, shape))


def _shared(pieces: Sequence[QTensor], name: str) -> Tensor | None:
    """The part ``name``, of which a stack has only one, so it must be the same in all pieces."""
    parts = [getattr(piece, name) for piece in pieces]
    held = [part for part in parts if part is not None]
    if held and (len(held) < len(parts) or not all(torch.equal(part, held[0]) for part in held)):
        raise ArgumentError(f"{pieces[0]!r} and others cannot be stacked: each has its own {name}, the whole only one")
    return parts[0]
