"""int4 for MPS: the canonical bytes, and scale with zero point as pairs [K/g, N, 2] in the scale's dtype.

A pair is (s, z) with value = (code - 8) * s + z, so z = (8 - zero) * s. Because z is rounded, the canonical ``zero`` is
kept as well, so that nothing is lost.
"""

from __future__ import annotations

import torch

from bitport.layouts.base import Matrix, Packed, register_layout
from bitport.layouts.plain_int32 import aligned
from bitport.layouts.tile_packed import pairs, refuses_groups
from bitport.numerics import FLOATS, Quantized


class Int4Pairs:
    name = "int4_pairs"
    devices: tuple[str, ...] = ("mps",)
    weight_only = True
    data_ndim = 2

    def expects(self, matrix: Matrix) -> Packed:
        return Packed(torch.uint8, (matrix.n, matrix.k // 2), (matrix.k // matrix.block_k, matrix.n, 2))

    def refuses(self, matrix: Matrix, parts: Quantized) -> str | None:
        if reason := refuses_groups(matrix, 32):
            return reason
        if matrix.n % 8:
            return f"N must be a multiple of 8, not {matrix.n}"
        if parts.scale.dtype not in FLOATS:
            return f"scales must be float32, bfloat16 or float16, not {parts.scale.dtype}"
        return None

    def pack(self, matrix: Matrix, parts: Quantized) -> Quantized:
        scale = pairs(parts).transpose(-3, -2).to(parts.scale.dtype).contiguous()
        return parts._replace(data=aligned(parts.data), scale=scale)

    def unpack(self, matrix: Matrix, parts: Quantized) -> Quantized:
        scale = parts.scale[..., 0].transpose(-1, -2).clone(memory_format=torch.contiguous_format)
        return parts._replace(scale=scale)


register_layout(Int4Pairs())
