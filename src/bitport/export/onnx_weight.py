"""Quantized weights as ONNX Runtime's MatMulNBits and GatherBlockQuantized (domain com.microsoft) expect them.

::

    codes   uint8 [n, blocks, block * bits / 8]   a row's codes in order, the low half of a byte first: as in "plain"
    scale   float32 [n, blocks]                   value = (code - zero) * scale
    zero    uint8 [n, blocks * bits / 8]          packed like the codes; float32 [n, blocks]; none: 2^(bits - 1)

A block is a power of two of at least 16 columns. The last one of a row is padded.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bitport.export.relink import Operand
from bitport.numerics import fake_quantize, number_type, pack_bits
from bitport.tensor import QTensor

TYPES = ("int4", "int8")
ACTS = ("int8", "int8-asym", "int8-tensor")
"""Input roundings that are expressed in standard operators."""
SMALLEST, WHOLE = 16, 128
"""The smallest block, and the block of a row that has a single scale."""
DOMAIN, VERSION = "com.microsoft", 1


def unfit(q: QTensor) -> str | None:
    """Why no ONNX model can use this weight, or None."""
    if q.matrix.dtype not in TYPES:
        return f"ONNX takes weights of {' or '.join(TYPES)}"
    if q.batched or q.dim() != 2:
        return "ONNX takes the matrix of one linear layer or table"
    if q.scheme.act and q.scheme.act not in ACTS:
        return f"ONNX takes inputs as they are, or rounded to {', '.join(ACTS)}, not to {q.scheme.act}"
    return None


def refusal(q: QTensor, op: str) -> str | None:
    """Why the operators cannot use this weight, or None."""
    if reason := unfit(q):
        return reason
    block, k = q.matrix.block_k, q.matrix.k
    if block < k and (block < SMALLEST or block & (block - 1)):
        return f"ONNX takes groups of a power of two of at least {SMALLEST}, such as 32 or 128, not of {block}"
    if op == "embedding" and q.scheme.weight.zero == "float":
        return "ONNX takes tables with whole zero points or none, such as int4 or int4-sym"
    return None


class OnnxWeight(Operand):
    scale: Tensor
    codes: Tensor
    zero: Tensor | None

    def __init__(self, q: QTensor) -> None:
        super().__init__()
        matrix, parts = q.matrix, q.plain()
        number = number_type(matrix.dtype)
        self.n, self.k, self.bits = matrix.n, matrix.k, number.bits
        self.block = matrix.block_k if matrix.block_k < matrix.k else _power_above(min(matrix.k, WHOLE))
        self.blocks = -(-matrix.k // self.block)
        size = self.block * self.bits // 8
        codes = F.pad(parts.data, (0, self.blocks * size - parts.data.shape[1]))
        self.register_buffer("codes", codes.reshape(self.n, self.blocks, size))
        self.register_buffer("scale", self._each(parts.scale.float(), matrix.block_n))
        zero = None if parts.zero is None else self._each(parts.zero, matrix.block_n)
        if zero is not None:
            zero = zero.float() if zero.is_floating_point() else pack_bits(zero, self.bits)
        self.register_buffer("zero", zero)

    def _each(self, part: Tensor, block_n: int) -> Tensor:
        """Expand to one number for each row and block of the ONNX weight."""
        part = part.repeat_interleave(block_n, 0)[: self.n]
        return part.expand(self.n, self.blocks).contiguous() if part.shape[1] == 1 else part

    def linear(self, x: Tensor, act: str, act_scale: Tensor | None, bias: Tensor | None) -> Tensor:
        if act:
            x = fake_quantize(x, act, act_scale)
        y = torch.onnx.ops.symbolic(
            f"{DOMAIN}::MatMulNBits",
            (x, self.codes, self.scale, self.zero),
            {"K": self.k, "N": self.n, "bits": self.bits, "block_size": self.block},
            dtype=x.dtype,
            shape=(*x.shape[:-1], self.n),
            version=VERSION,
        )
        return y if bias is None else y + bias.to(y.dtype)

    def embedding(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        columns = self.blocks * self.block
        y = torch.onnx.ops.symbolic(
            f"{DOMAIN}::GatherBlockQuantized",
            (self.codes.reshape(self.n, -1), ids, self.scale, self.zero),
            {"bits": self.bits, "block_size": self.block, "gather_axis": 0, "quantize_axis": 1},
            dtype=torch.float32,
            shape=(*ids.shape, columns),
            version=VERSION,
        )
        return y if columns == self.k else y[..., : self.k]


def _power_above(size: int) -> int:
    return max(SMALLEST, 1 << (size - 1).bit_length())
