"""What torch's own functions do with a weight in training: those that are a linear layer go to Product.

Anything else comes to bitport.train.aten through autograd, which is right for weights alone. Here are the functions
whose input is rounded too, so that the gradient of the weight is taken at the rounded input.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bitport.train.experts import grouped_mm
from bitport.train.product import linear
from bitport.train.tensor import FUNCTIONS, TrainedTensor


def _matmul(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def product(input: Tensor, other: Tensor) -> Tensor:
        if isinstance(input, TrainedTensor) and not isinstance(other, TrainedTensor) and other.dim() > 1:
            return product(other.mT, input.mT).mT
        if isinstance(other, TrainedTensor) and other.rounding.transposed and not isinstance(input, TrainedTensor):
            if other.dim() == 2:
                return linear(input, other.mT)
            if input.dim() == other.dim() == 3 and (other.scheme.act or other.rounding.gradients):
                pairs = zip(input.unbind(), other.mT.unbind(), strict=True)
                return torch.stack([linear(x, w) for x, w in pairs])
        with torch._C.DisableTorchFunctionSubclass():
            return function(input, other)

    return product


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    y = FUNCTIONS[torch.mm](mat1, mat2)
    return y * alpha + input * beta if (alpha, beta) != (1, 1) else y + input


FUNCTIONS.update({F.linear: linear, torch.addmm: _addmm, F.grouped_mm: grouped_mm, torch._grouped_mm: grouped_mm})
FUNCTIONS.update(
    {
        function: _matmul(function)
        for function in (
            torch.matmul,
            torch.mm,
            torch.bmm,
            Tensor.matmul,
            Tensor.__matmul__,
            Tensor.mm,
            Tensor.bmm,
        )
    }
)
