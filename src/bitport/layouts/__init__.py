"""Where the bits of a quantized matrix lie: the plain canonical layout and those derived from it."""

from bitport.layouts import cpu_tiles, plain, plain_int32, signed_int8, tile_packed  # noqa: F401  (each registers itself)
from bitport.layouts.base import LAYOUTS, Layout, Matrix, Packed, layout, preferred, register_layout, repack

__all__ = ["LAYOUTS", "Layout", "Matrix", "Packed", "layout", "preferred", "register_layout", "repack"]
