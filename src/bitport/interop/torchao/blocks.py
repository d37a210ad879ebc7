"""Shapes, blocks and scales of torchao's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bitport.interop.checks import expect
from bitport.interop.torchao.header import Entry
from bitport.numerics import Format, Quantized

LARGEST = 2**31 - 1
Tensors = dict[str, Tensor]
"""By their roles."""


class Found(NamedTuple):
    parts: Quantized
    format: Format
    shape: tuple[int, int]


def shape_of(entry: Entry) -> tuple[int, int]:
    """What the header says; to be compared with a tensor before anything is made of this size."""
    found = entry.said.get("shape")
    sizes = found if isinstance(found, list) else []
    if len(sizes) != 2 or not all(type(size) is int and 1 <= size <= LARGEST for size in sizes):
        raise entry.fail("shape", "matrices are read")
    return sizes[0], sizes[1]


def blocks_of(entry: Entry, shape: tuple[int, int]) -> tuple[int, int]:
    """Format.block of block_size, which has no 0 for a whole axis."""
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
    """Of int4, which has a scale per group of a row."""
    said = entry.said.get("block_size")
    group = said[1] if isinstance(said, list) and len(said) == 2 and said[0] == 1 else None
    if type(group) is not int or not 1 <= group <= columns:
        raise entry.fail("block_size", f"must be [1, columns of a group], up to {columns}")
    return group


def one_per_block(
    tensor: Tensor, name: str, dtypes: Sequence[torch.dtype], block: tuple[int, int], shape: tuple[int, int]
) -> Tensor:
    """As the grid of blocks, which older versions left out the dimensions of one from."""
    grid = Format(dtype="int8", block=block).scale_shape(*shape)
    if tensor.dim() < 2 and tensor.numel() == grid[0] * grid[1] and 1 in grid:
        tensor = tensor.reshape(grid)
    return expect(tensor, name, dtypes, grid).contiguous()
