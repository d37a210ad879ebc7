"""Integers of torchao in bitport's form; for their meaning see :mod:`bitport.interop.torchao.tensors`."""

from __future__ import annotations

import torch
from torch import Tensor

from bitport.errors import CheckpointError
from bitport.interop.checks import Stored
from bitport.interop.shifts import of_shifts, of_zero_points
from bitport.interop.torchao.blocks import Found, blocks_of, group_of, one_per_block, shape_of
from bitport.interop.torchao.header import Entry
from bitport.interop.words import to_codes
from bitport.layouts.tile_packed import unpack_tiles
from bitport.numerics import FLOATS
from bitport.numerics.packing import pack_bits, unpack_bits

INTX = {f"int{bits}": bits for bits in range(1, 9)}
FILLED = 1024
"""Columns of tile-packed weights are padded to a multiple of it, rows to a multiple of 8."""


def int4(entry: Entry, weight: Stored) -> Found:
    n, k = shape_of(entry)
    group = group_of(entry, k)
    qdata = weight.expect("qdata", (torch.uint8, torch.int8), (n, -(-k // 2)))
    codes = unpack_bits(qdata.contiguous().view(torch.uint8), 4, k) ^ 8
    grid = (-(-k // group), n)
    scale, zero = (weight.expect(role, FLOATS, grid).t() for role in ("scale", "zero_point"))
    return _centred(codes, scale, zero, group)


def int4_tiles(entry: Entry, weight: Stored) -> Found:
    n, k = shape_of(entry)
    rows, columns = -(-n // 8) * 8, -(-k // FILLED) * FILLED
    group = group_of(entry, columns)
    tiles = (rows // 8, columns // 128, 32, 4)
    qdata = weight.expect("qdata", (torch.int32,), tiles)
    grid = (-(-columns // group), rows, 2)
    pairs = weight.expect("scale_and_zero", FLOATS, grid)
    scale, zero = pairs[: -(-k // group), :n].transpose(0, 1).unbind(-1)
    return _centred(unpack_tiles(qdata)[:n, :k], scale, zero, group)


def int4_words(entry: Entry, weight: Stored) -> Found:
    n, k = shape_of(entry)
    group = group_of(entry, k)
    codes = to_codes(weight.expect("qdata", (torch.int32,), (n, -(-k // 8))), k, 4)
    grid = (-(-k // group), n)
    scale = weight.expect("scale", FLOATS, grid).t().contiguous()
    zero = weight.expect("zero_point", (torch.int8,), grid).t()
    return _integers(entry, codes, scale, zero.double(), 4, (1, group))


def int8(entry: Entry, weight: Stored) -> Found:
    return _of_bytes(entry, weight, 8)


def intx(entry: Entry, weight: Stored) -> Found:
    target = entry.said.get("target_dtype")
    if not isinstance(target, str) or target not in INTX:
        raise entry.fail("target_dtype", "int1 to int8 are read")
    return _of_bytes(entry, weight, INTX[target])


def _centred(codes: Tensor, scale: Tensor, zero: Tensor, group: int) -> Found:
    """value = (code - 8) * scale + zero. The shift is exact in float64."""
    parts, fmt = of_shifts(codes, scale, zero.double() - 8 * scale.double(), 4, group)
    return Found(parts, fmt, (codes.shape[0], codes.shape[1]))


def _of_bytes(entry: Entry, weight: Stored, bits: int) -> Found:
    qdata = weight.expect("qdata", (torch.int8,), (None, None))
    shape, middle = (qdata.shape[0], qdata.shape[1]), 1 << (bits - 1)
    if int(qdata.min()) < -middle or int(qdata.max()) >= middle:
        raise entry.fail("target_dtype", f"{weight.names['qdata']} must lie within {-middle} and {middle - 1}")
    block = blocks_of(entry, shape)
    scale = one_per_block(weight, "scale", FLOATS, block, shape)
    zero = torch.zeros_like(scale)
    if "zero_point" in weight:
        kinds = (torch.int8, *FLOATS)
        zero = one_per_block(weight, "zero_point", kinds, block, shape)
    return _integers(
        entry, (qdata.to(torch.int16) + middle).to(torch.uint8), scale, zero.double() + middle, bits, block
    )


def _integers(entry: Entry, codes: Tensor, scale: Tensor, zero: Tensor, bits: int, block: tuple[int, int]) -> Found:
    if not bool(((zero == zero.round()) & (zero >= 0) & (zero < 256)).all()):
        raise CheckpointError(
            f"{entry.parts['zero_point']}: less the smallest code they must be whole numbers from 0 to 255"
        )
    parts, fmt = of_zero_points(pack_bits(codes.contiguous(), bits), scale, zero, bits, block)
    return Found(parts, fmt, (codes.shape[0], codes.shape[1]))
