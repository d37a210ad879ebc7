"""The canonical layout: codes packed densely along K, least significant bits first; scale and zero as in the format.

::

    int4, one row:   byte 0          byte 1
                     k1 k1 k0 k0 ..  k3 .. k2 ..        even k in the low nibble
"""

import torch

from bitport.layouts.base import Matrix, Packed, register_layout
from bitport.numerics import Quantized, number_type, packed_size


class Plain:
    name = "plain"
    devices: tuple[str, ...] = ()
    data_ndim = 2
    weight_only = False

    def expects(self, matrix: Matrix) -> Packed:
        number = number_type(matrix.dtype)
        columns = packed_size(matrix.k, number.bits) if number.storage == torch.uint8 else matrix.k
        return Packed(number.storage, (matrix.n, columns), matrix.grid)

    def refuses(self, matrix: Matrix, parts: Quantized) -> str | None:
        return None

    def pack(self, matrix: Matrix, parts: Quantized) -> Quantized:
        return parts

    def unpack(self, matrix: Matrix, parts: Quantized) -> Quantized:
        return parts


register_layout(Plain())
