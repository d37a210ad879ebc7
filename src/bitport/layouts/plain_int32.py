"""int4 for XPU: the canonical bytes viewed as int32 [N, K/8] without a copy, and the scale transposed to [K/g, N].

On a little-endian machine nibble i of word j is column 8j + i, as ``aten::_weight_int4pack_mm_with_scales_and_zeros``
expects. Zero stays canonical ([N, K/g], or none); that op expects it as int8 [K/g, N], to which the kernel converts it.
"""

import torch

from bitport.layouts.base import Matrix, Packed, register_layout
from bitport.numerics import Quantized


class PlainInt32:
    name = "plain_int32"
    devices: tuple[str, ...] = ("xpu",)
    data_ndim = 2
    weight_only = False

    def expects(self, matrix: Matrix) -> Packed:
        return Packed(torch.int32, (matrix.n, matrix.k // 8), matrix.grid[::-1])

    def refuses(self, matrix: Matrix, parts: Quantized) -> str | None:
        if matrix.dtype != "int4":
            return f"it holds int4, not {matrix.dtype}"
        if matrix.k % 8:
            return f"K must be a multiple of 8 (eight codes in a word), not {matrix.k}"
        return None

    def pack(self, matrix: Matrix, parts: Quantized) -> Quantized:
        return parts._replace(data=aligned(parts.data).view(torch.int32), scale=_transposed(parts.scale))

    def unpack(self, matrix: Matrix, parts: Quantized) -> Quantized:
        return parts._replace(data=parts.data.view(torch.uint8), scale=_transposed(parts.scale))


def aligned(data: torch.Tensor) -> torch.Tensor:
    """``data`` if it can be viewed as int32, else a copy: a view may start inside a word (rows sliced from a file)."""
    aligned = data.is_contiguous() and data.storage_offset() % 4 == 0
    return data if aligned else data.contiguous().clone()


def _transposed(scale: torch.Tensor) -> torch.Tensor:
    return scale.transpose(-1, -2).contiguous()


register_layout(PlainInt32())
