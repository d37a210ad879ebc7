"""The layout of block scales for tensor cores, in which several libraries store them."""

from __future__ import annotations

import torch
from torch import Tensor

from bitport.interop.checks import expect

ROWS, COLUMNS = 128, 4
"""The shape of a tile."""


def unswizzled(scale: Tensor, name: str, grid: tuple[int, int]) -> Tensor:
    """Scales [rows, columns] from the tensor core layout: padded to tiles of 128x4, stored tile by tile. A tile is 32
    rows of 16: row r and column c of it are at [r % 32, r // 32 * 4 + c]."""
    tiles = (-(-grid[0] // ROWS), -(-grid[1] // COLUMNS))
    flat = expect(scale.flatten(), name, (scale.dtype,), (tiles[0] * tiles[1] * ROWS * COLUMNS,))
    # [tile row, tile column, r % 32, r // 32, c] -> [tile row, r // 32, r % 32, tile column, c]
    whole = flat.view(torch.uint8).reshape(*tiles, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return whole.reshape(tiles[0] * ROWS, tiles[1] * COLUMNS)[: grid[0], : grid[1]].contiguous().view(scale.dtype)


def swizzled(scale: Tensor) -> Tensor:
    """The inverse: [32 * rows of tiles, 16 * columns of tiles], padded with zeros."""
    tiles = (-(-scale.shape[0] // ROWS), -(-scale.shape[1] // COLUMNS))
    fill = (0, tiles[1] * COLUMNS - scale.shape[1], 0, tiles[0] * ROWS - scale.shape[0])
    whole = torch.nn.functional.pad(scale.view(torch.uint8), fill).reshape(tiles[0], 4, 32, tiles[1], 4)
    return whole.permute(0, 3, 2, 1, 4).reshape(tiles[0] * 32, tiles[1] * 16).view(scale.dtype)
