"""Conversions between floats and the parts of a QTensor, by the kernels of its device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bitport import layouts
from bitport.numerics import ACTIVATIONS, NUMBER_TYPES, Format, Quantized, dequantize_now, fake_quantize
from bitport.numerics.codec import readable
from bitport.ops.convert import format_json, from_list
from bitport.ops.outside import OUTSIDE
from bitport.ops.product import functorch, operand, run
from bitport.tensor import QTensor


def dense_rows(q: QTensor, dtype: torch.dtype) -> Tensor:
    """Dequantize the matrix [..., N, K] behind ``q`` by the kernel of its device. Uses torch's own ops while compiling,
    so that the compiler can fuse them, under torch.func transforms, which have no gradient of our ops, and for
    optimizer states, whose number types our ops do not support."""
    traced = torch.compiler.is_compiling() or functorch() is not None
    if (traced and q.qdata.device.type not in OUTSIDE) or q.matrix.dtype not in NUMBER_TYPES:
        plain = layouts.repack(q.matrix, readable(q.parts), q.bits_layout, "plain")
        return dequantize_now(plain, q.scheme.weight, q.matrix.n, q.matrix.k, dtype)
    return run("dequantize", *operand(q), dtype)


def quantize_weight(value: Tensor, fmt: Format) -> Quantized:
    """numerics.quantize, by the kernel of the value's device."""
    return from_list(run("quantize", value, format_json(fmt)))


def rounded_input(x: Tensor, act: str, act_scale: Tensor | None) -> Tensor:
    """numerics.fake_quantize in torch's ops; on an OUTSIDE device, by its kernels."""
    if x.device.type not in OUTSIDE:
        return fake_quantize(x, act, act_scale)
    m, k = math.prod(x.shape[:-1]), x.shape[-1]
    parts = from_list(run("quantize_input", x, act, act_scale))
    fmt = ACTIVATIONS[act]
    rounded = run("dequantize", *parts, fmt.dtype, m, k, *fmt.block_shape(m, k), "plain", torch.float32)
    return rounded.reshape(x.shape)
