"""int8 for integer matrix units: codes as two's complement, int8 [N, K].

A code c means c - 128 (there is no zero point), which is the byte c ^ 0x80 read as a signed number: what
``aten::_int_mm`` and ``aten::_weight_int8pack_mm`` multiply. Scale stays canonical.
"""

import torch

from bitport.layouts.base import Matrix, Packed, register_layout
from bitport.numerics import Quantized
from bitport.numerics.packing import from_signed, to_signed


class SignedInt8:
    name = "signed_int8"
    devices: tuple[str, ...] = ("cuda", "xpu", "mps")
    data_ndim = 2
    weight_only = False

    def expects(self, matrix: Matrix) -> Packed:
        return Packed(torch.int8, (matrix.n, matrix.k), matrix.grid)

    def refuses(self, matrix: Matrix, parts: Quantized) -> str | None:
        if matrix.dtype != "int8":
            return f"it holds int8, not {matrix.dtype}"
        if parts.zero is not None:
            return "its numbers are symmetric, without a zero point"
        if matrix.block_k < matrix.k:
            return f"no kernel that reads it takes groups along K, and these are of {matrix.block_k}"
        return None

    def pack(self, matrix: Matrix, parts: Quantized) -> Quantized:
        return parts._replace(data=to_signed(parts.data))

    def unpack(self, matrix: Matrix, parts: Quantized) -> Quantized:
        return parts._replace(data=from_signed(parts.data))


register_layout(SignedInt8())
