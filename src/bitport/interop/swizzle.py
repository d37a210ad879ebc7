"""Block scales from files that store them as tensor cores read them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bitport.interop.checks import expect
from bitport.numerics import swizzle


def unswizzled(scale: Tensor, name: str, dtypes: Sequence[torch.dtype], grid: tuple[int, int]) -> Tensor:
    """Scales of shape ``grid``, of one byte each, from the order of bitport.numerics.swizzle; CheckpointError unless
    they have one of ``dtypes``. ``name`` is the tensor's in the file."""
    tiles = swizzle.tiles_of(*grid)
    count = tiles[0] * tiles[1] * swizzle.ROWS * swizzle.COLUMNS
    return swizzle.unswizzled(expect(scale.flatten(), name, dtypes, (count,)), *grid)
