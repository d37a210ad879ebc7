"""Layout of integers for XLA: [K, N] with two's complement codes, the operand of a product x [M, K] @ w [K, N].

::

    int8   int8 [K, N]         scale, zero [K/g, N]
    int4   uint8 [K, N/2]      byte j of a row: n = 2j in the low nibble, n = 2j + 1 in the high one

The bytes of int4 are those of XLA's own int4 [K, N], which a TPU stores two to a byte and its kernels load without
unpacking; on a jax device the data becomes that type. Zero points stay in units of unsigned codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitport.layouts import Matrix, Packed
from bitport.numerics import Quantized, number_type, pack_bits, unpack_bits

NAME = "k_major"


class KMajor:
    name = NAME
    devices: tuple[str, ...] = ("xla", "tpu", "jax")
    data_ndim = 2
    weight_only = False

    def expects(self, matrix: Matrix) -> Packed:
        rows, columns = matrix.grid
        grid = (columns, rows)
        if matrix.dtype == "int4":
            return Packed(torch.uint8, (matrix.k, matrix.n // 2), grid, grid)
        return Packed(torch.int8, (matrix.k, matrix.n), grid, grid)

    def refuses(self, matrix: Matrix, parts: Quantized) -> str | None:
        if matrix.dtype not in ("int4", "int8"):
            return f"it holds int4 and int8, not {matrix.dtype}"
        if matrix.dtype == "int4" and matrix.n % 2:
            return f"int4 needs an even N (two codes of neighbouring rows share a byte), not {matrix.n}"
        if parts.scale.dtype.itemsize == 1:
            return f"its scales have 16 or 32 bits, and these are {parts.scale.dtype}"
        return None

    def pack(self, matrix: Matrix, parts: Quantized) -> Quantized:
        bits = number_type(matrix.dtype).bits
        codes = _turned(unpack_bits(parts.data, bits, matrix.k))
        codes = codes ^ (1 << (bits - 1))  # the offset becomes a sign
        data = pack_bits(codes, 4) if bits == 4 else _signed(codes)
        return Quantized(data, _turned(parts.scale), None if parts.zero is None else _turned(parts.zero), parts.scale2)

    def unpack(self, matrix: Matrix, parts: Quantized) -> Quantized:
        bits = number_type(matrix.dtype).bits
        codes = unpack_bits(parts.data, 4, matrix.n) if bits == 4 else parts.data.to(torch.uint8)
        data = pack_bits(_turned(codes ^ (1 << (bits - 1))), bits)
        return Quantized(data, _turned(parts.scale), None if parts.zero is None else _turned(parts.zero), parts.scale2)


def _signed(codes: Tensor) -> Tensor:
    """Reinterpret uint8 as int8, by conversions that are defined the same on every device."""
    wide = codes.to(torch.int16)
    return torch.where(wide > 127, wide - 256, wide).to(torch.int8)


def _turned(part: Tensor) -> Tensor:
    return part.transpose(-1, -2).contiguous()
