"""Quantized weights in standard ONNX operators: DequantizeLinear (opset 21), then an ordinary product.

::

    codes   uint8 or uint4 [n, k]       scale   float32 [n, blocks], or [n] for whole rows
    zero    like codes, in the shape of scale             value = (code - zero) * scale
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bitport.export.onnx_weight import unfit
from bitport.export.relink import Operand
from bitport.numerics import fake_quantize, number_type, unpack_bits
from bitport.tensor import QTensor

OPSET = 21
NARROW = ("codes4", "zero4")
"""Names of the buffers with 4-bit numbers, for which torch has no dtype."""


def refusal(q: QTensor, op: str) -> str | None:
    """Why DequantizeLinear cannot represent this weight, or None."""
    if q.scheme.weight.zero == "float" and op != "embedding":
        return "DequantizeLinear takes whole zero points or none, such as int4 or int4-sym"
    return unfit(q)


class QdqWeight(Operand):
    scale: Tensor

    def __init__(self, q: QTensor) -> None:
        super().__init__()
        matrix, parts, number = q.matrix, q.plain(), number_type(q.matrix.dtype)
        self.n, self.k = matrix.n, matrix.k
        self.names = NARROW if number.bits == 4 else ("codes", "zero")
        zero = torch.full_like(parts.scale, number.midpoint).byte() if parts.zero is None else parts.zero
        each = [part.repeat_interleave(matrix.block_n, 0)[: self.n] for part in (parts.scale.float(), zero)]
        scale, zero = (part[:, 0].contiguous() if matrix.block_k >= matrix.k else part for part in each)
        self.register_buffer(self.names[0], unpack_bits(parts.data, number.bits, self.k))
        self.register_buffer("scale", scale)
        self.register_buffer(self.names[1], zero)
        self.where: dict[str, Any] = {"axis": 0} if scale.dim() == 1 else {"axis": 1, "block_size": matrix.block_k}

    def linear(self, x: Tensor, act: str, act_scale: Tensor | None, bias: Tensor | None) -> Tensor:
        if act:
            x = fake_quantize(x, act, act_scale)
        codes, zero = (getattr(self, name) for name in self.names)
        given = (codes, self.scale, zero)
        shape = (self.n, self.k)
        weight = torch.onnx.ops.symbolic(
            "DequantizeLinear", given, self.where, dtype=x.dtype, shape=shape, version=OPSET
        )
        return F.linear(x, weight, bias)


def narrow(model: Any) -> None:
    """Convert 4-bit initializers to uint4, which files store two to a byte, the low half first."""
    import ml_dtypes
    import onnx_ir

    for name, value in model.graph.initializers.items():
        if name.endswith(NARROW):
            numbers = value.const_value.numpy().astype(ml_dtypes.uint4)
            value.const_value = onnx_ir.Tensor(numbers, name=name)
            value.type = onnx_ir.TensorType(onnx_ir.DataType.UINT4)
