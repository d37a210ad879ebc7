"""Split a matrix into pieces whose temporaries fit a processor's cache, so that searches with many passes over all
weights are limited by arithmetic rather than memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from bitport.numerics import Format, Params, Quantized, decode_codebook, encode_codebook, spread, to_blocks
from bitport.numerics.codec import has_whole_zero, zero_of
from bitport.numerics.floats import nearest_value

Parts = TypeVar("Parts", Params, Quantized)

PIECE = 2**17
"""Elements; in float32 a quarter of the L2 caches of two cores."""


def pieces(blocks: Tensor) -> Iterator[slice]:
    """Slices of the first axis. Devices other than CPUs prefer few large operations: one piece."""
    each = len(blocks)
    if blocks.device.type == "cpu":
        each = max(1, PIECE * each // max(1, blocks.numel()))
    for start in range(0, len(blocks), max(1, each)):
        yield slice(start, start + each)


def row_pieces(x: Tensor, fmt: Format) -> Iterator[tuple[slice, slice]]:
    """The same of x [N, K] in whole blocks: (rows of x, rows of its scales)."""
    blocks = to_blocks(x, fmt.block)
    for at in pieces(blocks):
        yield slice(at.start * blocks.shape[1], at.stop * blocks.shape[1]), at


def part_of(params: Params, at: slice) -> Params:
    return Params(params.scale[at], None if params.zero is None else params.zero[at], params.scale2)


def joined(found: Sequence[Params]) -> Params:
    """Concatenate the parameters of pieces to those of the matrix."""
    zeros = [params.zero for params in found if params.zero is not None]
    return Params(torch.cat([params.scale for params in found]), torch.cat(zeros) if zeros else None, found[0].scale2)


def by_rows(convert: Callable[[Tensor, Params], Tensor], x: Tensor, fmt: Format, params: Params) -> Tensor:
    """Apply ``convert`` to x [..., N, K] and ``params``; on a CPU, to each of their pieces."""
    if x.device.type != "cpu":
        return convert(x, params)
    if x.dim() > 2:
        each = (Params(*(None if part is None else part[at] for part in params)) for at in range(len(x)))  # type: ignore[arg-type]
        return torch.stack([by_rows(convert, matrix, fmt, its) for matrix, its in zip(x, each, strict=True)])
    return torch.cat([convert(x[rows], part_of(params, at)) for rows, at in row_pieces(x, fmt)])


def by_matrix(search: Callable[..., Params], x: Tensor, *beside: Tensor) -> Params:
    """Apply ``search`` to x [N, K], or separately to each matrix of [..., N, K], along with its part of ``beside``."""
    if x.dim() == 2:
        return search(x, *beside)
    return stacked([by_matrix(search, *each) for each in zip(x, *beside, strict=True)])


def stacked(found: Sequence[Parts]) -> Parts:
    """Stack the parts of several matrices into those of one batch."""
    parts = (None if part[0] is None else torch.stack(part) for part in zip(*found, strict=True))
    return type(found[0])(*parts)  # type: ignore[arg-type]


def nearest(
    x: Tensor, fmt: Format, scale: Tensor, zero: Tensor | None, room: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return x [SN, bn, SK, bk] in units of its scale, and the nearest numbers of the format (codes minus zero point).
    ``scale``: float32; ``room``: buffers for both results. Because it multiplies by 1 / scale, ties may be rounded
    differently than after a division, but no further from x."""
    units = torch.mul(x, spread(1 / scale), out=room[0])
    return units, nearest_number(units, fmt, zero_of(fmt, zero), out=room[1])


def nearest_number(units: Tensor, fmt: Format, offset: Tensor | float, out: Tensor) -> Tensor:
    """The numbers of the format (codes minus ``offset``, their zero point) that are nearest to ``units``."""
    number = fmt.number
    if number.kind == "float":
        return nearest_value(units, number, out=out)
    if number.kind == "codebook":
        return decode_codebook(encode_codebook(units, number.table), number.table)
    if has_whole_zero(fmt):
        codes = torch.round(units, out=out).add_(offset)
    else:
        codes = torch.add(units, offset, out=out).round_()
    # clamp with tensors as limits would be five times slower
    return codes.clamp_(0, number.qmax).sub_(offset)
