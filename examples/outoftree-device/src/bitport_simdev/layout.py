"""The weight layout of this device, ``sim_rows8``: codes of eight rows are interleaved, column by column.

The kernel multiplies eight rows by one input at a time, so it reads eight contiguous codes per column and eight scales
per group. N is padded to a multiple of 8 with rows of code 0 and scale 0::

    data  uint8 [N/8, K, bits]     int4, one column:  byte 0   byte 1   byte 2   byte 3
                                                      r4 r0    r5 r1    r6 r2    r7 r3     (high nibble, low nibble)
                                   int8, one column:  byte i is row i
    scale       [K/g, N']          zero is unchanged, [N, K/g]
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitport.layouts import Matrix, Packed, register_layout
from bitport.numerics import Quantized, pack_bits, unpack_bits

ROWS = 8
BITS = {"int4": 4, "int8": 8}


class SimRows8:
    name = "sim_rows8"
    devices: tuple[str, ...] = ("sim",)
    data_ndim = 3
    weight_only = False

    def expects(self, matrix: Matrix) -> Packed:
        blocks = -(-matrix.n // ROWS)
        return Packed(torch.uint8, (blocks, matrix.k, BITS.get(matrix.dtype, 0)), (matrix.grid[1], blocks * ROWS))

    def refuses(self, matrix: Matrix, parts: Quantized) -> str | None:
        if matrix.dtype not in BITS:
            return f"it holds {' and '.join(BITS)}, not {matrix.dtype}"
        if matrix.block_n != 1:
            return f"each row has its own scales, not each {matrix.block_n} rows"
        return None

    def pack(self, matrix: Matrix, parts: Quantized) -> Quantized:
        bits = BITS[matrix.dtype]
        codes = fill_rows(unpack_bits(parts.data, bits, matrix.k))
        columns = codes.unflatten(-2, (-1, ROWS)).transpose(-1, -2)
        if bits == 4:
            columns = columns[..., :4] | columns[..., 4:] << 4
        return parts._replace(data=columns.contiguous(), scale=fill_rows(parts.scale).transpose(-1, -2).contiguous())

    def unpack(self, matrix: Matrix, parts: Quantized) -> Quantized:
        bits, columns = BITS[matrix.dtype], parts.data
        if bits == 4:
            columns = torch.cat([columns & 0xF, columns >> 4], -1)
        codes = columns.transpose(-1, -2).flatten(-3, -2)[..., : matrix.n, :]
        scale = parts.scale[..., : matrix.n].transpose(-1, -2).contiguous()
        return parts._replace(data=pack_bits(codes.contiguous(), bits), scale=scale)


def fill_rows(part: Tensor) -> Tensor:
    missing = -part.shape[-2] % ROWS
    return torch.cat([part, part.new_zeros(*part.shape[:-2], missing, part.shape[-1])], -2) if missing else part


register_layout(SimRows8())
