"""The canonical layout: codes dense along K, least significant bits first; scale and zero as the format has them.

::

    int4, one row:   byte 0          byte 1
                     k1 k1 k0 k0 ..  k3 .. k2 ..        even k in the low nibble
"""

from bitport.layouts.base import Matrix, register_layout
from bitport.numerics import Quantized


class Plain:
    name = "plain"
    devices: tuple[str, ...] = ()
    data_ndim = 2

    def refuses(self, matrix: Matrix, parts: Quantized) -> str | None:
        return None

    def pack(self, matrix: Matrix, parts: Quantized) -> Quantized:
        return parts

    def unpack(self, matrix: Matrix, parts: Quantized) -> Quantized:
        return parts


register_layout(Plain())
