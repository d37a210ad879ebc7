"""Combine quantized matrices exactly: stack them, as experts are, or concatenate them along their outputs. Matrices
with a single scale get one scale per row when concatenated."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bitport.errors import ArgumentError
from bitport.numerics import Quantized
from bitport.numerics.codec import block_scale
from bitport.numerics.packing import as_bytes
from bitport.tensor.borders import is_conv
from bitport.tensor.join import join
from bitport.tensor.parts import matrix_of
from bitport.tensor.qtensor import EXTRA, QTensor


def stacked(pieces: Sequence[QTensor]) -> QTensor:
    """Stack E matrices [N, K] into [E, N, K], in the plain layout."""
    plain = [piece.to_layout("plain") for piece in pieces]
    first = plain[0]
    for piece in plain:
        same = [(q.scheme, q.transposed, q.dtype, q.batched, tuple(q.shape)) for q in (piece, first)]
        if same[0] != same[1] or piece.batched:
            raise ArgumentError(f"{first!r} and {piece!r} cannot be stacked: they are not alike")
    data, scale, *rest = (
        None if parts[0] is None else torch.stack([as_bytes(part) for part in parts]).view(parts[0].dtype)
        for parts in zip(*(piece.parts for piece in plain), strict=True)
    )
    assert data is not None
    assert scale is not None
    shared = {name: _shared(plain, name) for name in EXTRA}
    return first.replace(Quantized(data, scale, *rest), shape=(len(plain), *first.shape), **shared)


def beside(pieces: Sequence[QTensor]) -> QTensor:
    """Concatenate [N1, K], [N2, K] .. into [N1 + N2 + .., K], in the plain layout; convolutions along dim 0."""
    plain = [piece.to_layout("plain") for piece in pieces]
    block = plain[0].scheme.weight.block[0]
    apart = block == 0 or any(piece.matrix.n % block for piece in plain[:-1])
    plain = [_without_global(_by_rows(piece) if apart else piece) for piece in plain]
    outputs = 0 if is_conv(plain[0]) else -1 if plain[0].transposed else -2
    return join(plain, outputs)


def _by_rows(q: QTensor) -> QTensor:
    """Repeat scales shared by several rows, so that each row has its own."""
    n, fmt = q.matrix.n, q.scheme.weight
    each = torch.arange(n, device=q.qdata.device) // q.matrix.block_n
    zero = None if q.zero is None else q.zero[each]
    return _in_format(
        q, q.parts._replace(scale=as_bytes(q.scale)[each].view(q.scale.dtype), zero=zero), block=(1, fmt.block[1])
    )


def _without_global(q: QTensor) -> QTensor:
    """Fold a global scale into the block scales: their float32 product, which is what dequantization uses anyway."""
    if q.scale2 is None:
        return q
    parts = q.parts._replace(scale=block_scale(q.scale, q.scale2), scale2=None)
    return _in_format(q, parts, scale="float32", global_scale=False)


def _in_format(q: QTensor, parts: Quantized, **changes: Any) -> QTensor:
    fmt = dataclasses.replace(q.scheme.weight, **changes)
    scheme = dataclasses.replace(q.scheme, weight=fmt)
    return q.replace(parts, scheme=scheme, matrix=matrix_of(fmt, q.matrix.n, q.matrix.k))


def _shared(pieces: Sequence[QTensor], name: str) -> Tensor | None:
    """The part ``name``, of which a stack has only one, so it must be the same in all pieces."""
    parts = [getattr(piece, name) for piece in pieces]
    held = [part for part in parts if part is not None]
    if held and (len(held) < len(parts) or not all(torch.equal(part, held[0]) for part in held)):
        raise ArgumentError(f"{pieces[0]!r} and others cannot be stacked: each has its own {name}, the whole only one")
    return parts[0]
