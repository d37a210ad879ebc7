"""Block scales from files that store them as tensor cores read them."""

from __future__ import annotations

from torch import Tensor

from bitport.interop.checks import expect
from bitport.numerics import swizzle


def unswizzled(scale: Tensor, name: str, grid: tuple[int, int]) -> Tensor:
    """Scales of shape ``grid`` from the order of bitport.numerics.swizzle; ``name`` is the tensor's in the file."""
    tiles = swizzle.tiles_of(*grid)
    count = tiles[0] * tiles[1] * swizzle.ROWS * swizzle.COLUMNS
    return swizzle.unswizzled(expect(scale.flatten(), name, (scale.dtype,), (count,)), *grid)
