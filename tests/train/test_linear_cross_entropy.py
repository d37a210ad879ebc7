"""F.linear_cross_entropy of a quantized weight and of one in training, against PyTorch's own of the rounded floats."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitport.tensor import quantize_tensor
from bitport.train import TrainedTensor
from bitport.train.tensor import Rounding

options = pytest.importorskip("torch.nn.modules.linear_cross_entropy_options", reason="needs PyTorch 2.13")

K, CLASSES = 64, 96
CHUNKS = options.LinearCrossEntropyOptions(batch_chunk_size=4)
HOW: dict[str, dict[str, Any]] = {
    "mean": {},
    "chunks": {"options": CHUNKS},
    "sum of chunks": {"options": CHUNKS, "reduction": "sum", "ignore_index": 3},
    "each": {"options": CHUNKS, "reduction": "none"},
    "smooth": {"options": CHUNKS, "label_smoothing": 0.1, "weight": torch.rand(CLASSES)},
}


def results(x: Tensor, matrix: Tensor, target: Tensor, bias: Tensor, **how: Any) -> list[Tensor | None]:
    """The loss, and the gradients of the input, the weight and the bias."""
    x, bias = x.clone().requires_grad_(), bias.clone().requires_grad_()
    loss = F.linear_cross_entropy(x, matrix, target, linear_bias=bias, **how)
    loss.sum().backward()
    return [loss.detach(), x.grad, matrix.grad, bias.grad]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", ["quantized", "trained"])
def test_it_multiplies_with_the_rounded_weight(kind: str, how: str) -> None:
    """In chunks the float values were used while gradients are recorded, and a quantized weight was refused."""
    x, bias, target = torch.randn(16, K), torch.randn(CLASSES), torch.randint(CLASSES, (16,))
    value = torch.randn(CLASSES, K)
    rounded = quantize_tensor(value, "int4-g32")
    given = rounded if kind == "quantized" else nn.Parameter(TrainedTensor(value, Rounding(rounded.scheme)))
    made = results(x, given, target, bias, **HOW[how])
    expected = results(x, rounded.dequantize().requires_grad_(kind == "trained"), target, bias, **HOW[how])
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other)
