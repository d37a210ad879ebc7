"""Memory layouts of quantized matrices: the canonical layout ``plain`` and those derived from it."""

from bitport.layouts import (  # noqa: F401  (each registers itself)
    cpu_tiles,
    int4_pairs,
    plain,
    plain_int32,
    signed_int8,
    tile_packed,
)
from bitport.layouts.base import LAYOUTS, Layout, Matrix, Packed, layout, preferred, register_layout, repack

__all__ = ["LAYOUTS", "Layout", "Matrix", "Packed", "layout", "preferred", "register_layout", "repack"]
