"""Shapes, blocks and scales of torchao's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bitport.interop.checks import Stored
from bitport.interop.torchao.header import Entry
from bitport.numerics import Format, Quantized

LARGEST = 2**31 - 1


class Found(NamedTuple):
    parts: Quantized
    format: Format
    shape: tuple[int, int]


def shape_of(entry: Entry) -> tuple[int, int]:
    """The shape in the header, to be compared with a tensor before anything of this size is created."""
    found = entry.said.get("shape")
    sizes = found if isinstance(found, list) else []
    if len(sizes) != 2 or not all(type(size) is int and 1 <= size <= LARGEST for size in sizes):
        raise entry.fail("shape", "matrices are read")
    return sizes[0], sizes[1]


def blocks_of(entry: Entry, shape: tuple[int, int]) -> tuple[int, int]:
    """block_size as Format.block, in which 0 means a whole axis."""
    said = entry.said.get("block_size") or list(shape)
    if (
        not isinstance(said, list)
        or len(said) != 2
        or not all(type(size) is int and 1 <= size <= most for size, most in zip(said, shape, strict=True))
    ):
        raise entry.fail("block_size", f"must be [rows, columns], up to {list(shape)}")
    rows, columns = said
    if columns == shape[1]:
        return (1, 0) if rows == 1 else (0, 0) if rows == shape[0] else (rows, columns)
    return rows, columns


def group_of(entry: Entry, columns: int) -> int:
    """The group of int4, which has a scale per group of a row."""
    said = entry.said.get("block_size")
    group = said[1] if isinstance(said, list) and len(said) == 2 and said[0] == 1 else None
    if type(group) is not int or not 1 <= group <= columns:
        raise entry.fail("block_size", f"must be [1, columns of a group], up to {columns}")
    return group


def one_per_block(
    weight: Stored, role: str, dtypes: Sequence[torch.dtype], block: tuple[int, int], shape: tuple[int, int]
) -> Tensor:
    """Its tensor as the grid of blocks; older versions omitted dimensions of one."""
    return weight.grid(role, dtypes, Format(dtype="int8", block=block).scale_shape(*shape))
