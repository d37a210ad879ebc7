"""Block scales in the order in which tensor cores read them, and in which several libraries store them: in tiles of
128x4, padded to whole tiles, which are in row-major order. A tile is 32 rows of 16 bytes: row r and column c of it are
at [r % 32, r // 32 * 4 + c]."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS, COLUMNS = 128, 4
"""The shape of a tile."""


def tiles_of(rows: int, columns: int) -> tuple[int, int]:
    """How many tiles hold [rows, columns]."""
    return -(-rows // ROWS), -(-columns // COLUMNS)


def swizzled(scale: Tensor) -> Tensor:
    """Scales [rows, columns] of one byte as [32 * rows of tiles, 16 * columns of tiles], padded with zeros."""
    tiles = tiles_of(*scale.shape)
    fill = (0, -scale.shape[1] % COLUMNS, 0, -scale.shape[0] % ROWS)
    whole = F.pad(scale.view(torch.uint8), fill).reshape(tiles[0], 4, 32, tiles[1], 4)
    return whole.permute(0, 3, 2, 1, 4).reshape(tiles[0] * 32, tiles[1] * 16).view(scale.dtype)


def unswizzled(scale: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse, of scales in any shape."""
    tiles = tiles_of(rows, columns)
    # [tile row, tile column, r % 32, r // 32, c] -> [tile row, r // 32, r % 32, tile column, c]
    whole = scale.view(torch.uint8).reshape(*tiles, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return whole.reshape(tiles[0] * ROWS, tiles[1] * COLUMNS)[:rows, :columns].contiguous().view(scale.dtype)
