"""PyTorch's flop counter counts quantized products like those of the float model."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import bitport
from bitport import train


def counted(model: nn.Module, x: torch.Tensor, *, backward: bool = False) -> int:
    with FlopCounterMode(display=False) as counter:
        y = model(x.clone().requires_grad_(backward))
        if backward:
            y.sum().backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "and backward"])
@pytest.mark.parametrize("scheme", ["int4-g32", "int8-dyn", "fp8-row", "nvfp4"])
def test_a_model_counts_like_its_floats(scheme: str, backward: bool) -> None:
    """Forward, backward and fused products count; without a formula they count as 0."""
    model, x = nn.Sequential(nn.Linear(96, 128), nn.GELU(), nn.Linear(128, 64)), torch.randn(2, 5, 96)
    bitport.quantize_(model, scheme)
    floats = bitport.dequantize_(copy.deepcopy(model))
    rows = 2 * 5 * (96 * 128 + 128 * 64)
    assert counted(floats, x, backward=backward) == 2 * rows * (1 + backward)
    assert counted(model, x, backward=backward) == 2 * rows * (1 + backward)
    bitport.fuse_activations_(model)
    assert counted(model, x) == 2 * rows


def test_experts_count_the_rows_they_get() -> None:
    weight = bitport.quantize_tensor(torch.randn(3, 64, 96), "int4-g32")
    with FlopCounterMode(display=False) as counter:
        F.grouped_mm(torch.randn(10, 96), weight.mT, offs=torch.tensor([4, 4, 10], dtype=torch.int32))
    assert counter.get_total_flops() == 2 * 10 * 96 * 64


def test_weights_in_training_count() -> None:
    model, x = nn.Sequential(nn.Linear(96, 64)), torch.randn(5, 96)
    train.prepare_(model, "int8-dyn")
    assert counted(model, x, backward=True) == 2 * 5 * 96 * 64 * 3
