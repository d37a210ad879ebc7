"""The tensor classes of torchao: their parts, and their meaning. For a weight [N, K] with groups of g::

    Int4Tensor                 qdata (u)int8 [N, K/2], scale and zero_point float [K/g, N]
                               value = q * scale + zero_point    q from -8 to 7, two's complement, the even one low
    Int4PlainInt32Tensor       qdata int32 [N, K/8], scale float and zero_point int8 [K/g, N]
                               value = (q - zero_point) * scale    q from 0 to 15, lowest bits first
    Int4TilePackedTo4dTensor   qdata int32 and scale_and_zero bfloat16 as in bitport.layouts.tile_packed, N padded to
                               multiples of 8 and K of 1024                  value = (q - 8) * scale + zero
    Int8Tensor                 qdata int8 [N, K], scale and optionally zero_point, one per block_size
    IntxUnpackedToInt8Tensor   the same, with q of the bits of target_dtype       value = (q - zero_point) * scale
    Float8Tensor               qdata [N, K], scale one per block_size              value = q * scale
    MXTensor                   qdata e4m3, e5m2 [N, K] or e2m1 [N, K/2], scale e8m0 [N, K/32]
    NVFP4Tensor                qdata e2m1 [N, K/2], scale e4m3 [N, K/16], optionally per_tensor_scale float32
                               value = q * scale * per_tensor_scale                the even one of two e2m1 low

Inputs are multiplied by act_pre_scale [K]; act_quant_scale is their static scale. Int4PlainInt32Tensor for Ascend
processors, with float zero points, is not read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from bitport.interop.checks import Stored
from bitport.interop.torchao.blocks import Found
from bitport.interop.torchao.floats import float8, mx, nvfp4
from bitport.interop.torchao.header import Entry
from bitport.interop.torchao.integers import int4, int4_tiles, int4_words, int8, intx


class TensorClass(NamedTuple):
    read: Callable[[Entry, Stored], Found]
    parts: tuple[str, ...]
    attributes: tuple[str, ...]
    optional: tuple[str, ...] = ()


KERNELS = ("mm_config", "kernel_preference", "use_triton_kernel")
"""Attributes that select how a product is computed."""
DTYPES = ("dtype", "orig_dtype")
"""The dtype that a weight was quantized from, which config.json has, too."""
SHIFTED = ("qdata", "scale", "zero_point")
TENSOR_CLASSES: dict[str, TensorClass] = {
    "Int4Tensor": TensorClass(int4, SHIFTED, ("block_size", "shape", "activation_dtype"), ("act_pre_scale",)),
    "Int4PlainInt32Tensor": TensorClass(int4_words, SHIFTED, ("block_size", "shape"), ("act_pre_scale",)),
    "Int4TilePackedTo4dTensor": TensorClass(
        int4_tiles, ("qdata", "scale_and_zero"), ("block_size", "shape"), ("act_pre_scale",)
    ),
    "Int8Tensor": TensorClass(
        int8,
        ("qdata", "scale"),
        ("block_size", "act_quant_kwargs", "reduce_range"),
        ("zero_point", "act_quant_scale", "act_quant_zero_point", "act_pre_scale"),
    ),
    "IntxUnpackedToInt8Tensor": TensorClass(intx, SHIFTED, ("target_dtype", "block_size", "activation_quantization")),
    "Float8Tensor": TensorClass(float8, ("qdata", "scale"), ("block_size", "act_quant_kwargs")),
    "MXTensor": TensorClass(
        mx, ("qdata", "scale"), ("elem_dtype", "block_size", "act_quant_kwargs", "is_swizzled_scales")
    ),
    "NVFP4Tensor": TensorClass(
        nvfp4,
        ("qdata", "scale"),
        ("block_size", "act_quant_kwargs", "is_swizzled_scales"),
        ("per_tensor_scale", "act_per_tensor_scale"),
    ),
}
