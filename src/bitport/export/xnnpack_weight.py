"""Quantized weights as XNNPACK, the CPU backend of ExecuTorch, expects them: patterns of ``quantized_decomposed`` ops.

::

    codes   int8 [n, k]: code - 2^(bits - 1)            scale   float32 [n, k / group], or [n] for whole rows
    x       rounded to int8, with a scale and a zero point per row, chosen by XNNPACK

value = codes * scale. 4-bit codes are packed in pairs when the program is written. XNNPACK misreads rows of odd length,
so these are padded with a column of zeros, along with their input. A lookup is not a product: ordinary
operators compute it (:mod:`bitport.export.lookup`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.ao.quantization.fx import _decomposed  # noqa: F401  (defines the ops)

from bitport.export.relink import Operand
from bitport.numerics import number_type, unpack_bits
from bitport.tensor import QTensor

TYPES = ("int4", "int8")
ACTS = ("int8", "int8-asym")
GROUP = 32
"""XNNPACK requires groups of 4-bit codes to be multiples of this many columns."""
ops = torch.ops.quantized_decomposed


def refusal(q: QTensor, op: str) -> str | None:
    """Why the program cannot use this weight, or None."""
    matrix, parts, act = q.matrix, q.plain(), q.scheme.act
    grouped = matrix.block_k < matrix.k
    if matrix.dtype not in TYPES:
        return f"ExecuTorch takes weights of {' or '.join(TYPES)}"
    if q.batched or q.dim() != 2 or matrix.block_n != 1:
        return "ExecuTorch takes the matrix of one linear layer or table, with scales of single rows"
    if parts.zero is not None:
        return "XNNPACK takes no zero points: choose int4-int8, int8-dyn or another scheme that ends in -sym"
    if op == "embedding":
        return None
    if act not in ACTS:
        given = f"rounded to {act}" if act else "as they are"
        return f"XNNPACK rounds inputs to int8, and this scheme takes them {given}: choose int4-int8 or int8-dyn"
    if grouped and (matrix.dtype != "int4" or matrix.block_k % GROUP or matrix.k % matrix.block_k):
        return (
            f"XNNPACK takes groups for int4 alone, of a multiple of {GROUP} columns that divides k, not {matrix.dtype} "
            f"in groups of {matrix.block_k}; whole rows (-channel) always fit"
        )
    scale = parts.scale.float()
    if not bool((scale.isfinite() & (scale >= torch.finfo(torch.float32).smallest_normal)).all()):
        return "XNNPACK takes scales that are finite, positive and normal"
    if grouped and not torch.equal(scale.bfloat16().float(), scale):
        return (
            "XNNPACK keeps the scales of groups in bfloat16, and these have more digits: quantize the model in "
            "bfloat16, then export model.float()"
        )
    return None


class XnnpackWeight(Operand):
    codes: Tensor
    scale: Tensor
    zero: Tensor

    def __init__(self, q: QTensor) -> None:
        super().__init__()
        matrix, parts = q.matrix, q.plain()
        self.bits = number_type(matrix.dtype).bits
        self.group = matrix.block_k if matrix.block_k < matrix.k else 0
        self.missing = matrix.k % 2 if self.bits == 4 else 0
        codes = unpack_bits(parts.data, self.bits, matrix.k).to(torch.int16) - (1 << (self.bits - 1))
        self.register_buffer("codes", F.pad(codes.to(torch.int8), (0, self.missing)))
        self.register_buffer("scale", parts.scale.float() if self.group else parts.scale[:, 0].float())
        self.register_buffer("zero", torch.zeros_like(self.scale, dtype=torch.int64))

    def linear(self, x: Tensor, act: str, act_scale: Tensor | None, bias: Tensor | None) -> Tensor:
        x = F.pad(x, (0, self.missing)) if self.missing else x  # the rounded range includes zero anyway
        row = ops.choose_qparams_per_token_asymmetric(x, torch.int8)
        x = ops.quantize_per_token(x, *row, -128, 127, torch.int8)
        x = ops.dequantize_per_token(x, *row, -128, 127, torch.int8, torch.float32)
        return F.linear(x, self.value(), bias)

    def value(self) -> Tensor:
        least, most = -(1 << (self.bits - 1)), (1 << (self.bits - 1)) - 1
        weight = (self.codes, self.scale, self.zero)
        if self.group:
            return ops.dequantize_per_channel_group(*weight, least, most, torch.int8, self.group, torch.float32)
        return ops.dequantize_per_channel(*weight, 0, least, most, torch.int8)
