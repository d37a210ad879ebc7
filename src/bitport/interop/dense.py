"""Dequantization of a model: each weight [.., N, K] as floats in the dtype of the model. For programs that read no
quantized weights, and to requantize models that were only published quantized."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bitport.interop import codec
from bitport.interop.codec import Described
from bitport.tensor import QTensor

ROUNDED = "weights are rounded to {dtype}"
INPUTS = "inputs are not rounded any more, as they were for {act}"


class Writer(codec.Writer):
    name = "float"
    upright = False

    def refuses(self, q: Described) -> str | None:
        return None

    def write(self, name: str, q: QTensor) -> dict[str, Tensor]:
        self.tell(ROUNDED.format(dtype=q.dtype))
        if q.scheme.act:
            self.tell(INPUTS.format(act=q.scheme.act))
        return {name: q.dequantize().contiguous()}

    def config(self, left: list[str]) -> dict[str, Any] | None:
        return None
