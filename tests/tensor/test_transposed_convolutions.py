"""Modules of transposed convolutions: a quantized matrix of theirs has a row for each input channel."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import bitport


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_the_values_of_the_weight_are_those_that_compute(rank: int) -> None:
    layer = getattr(nn, f"ConvTranspose{rank}d")(8, 12, 3, stride=2, padding=1, output_padding=1, groups=2)
    floats = layer.weight.detach()
    report = bitport.quantize_(layer, {"*": "int8"})
    assert not report.skipped
    assert bitport.explain(layer).layers[0].op == "dequantize"
    scale = layer.weight.plain().scale
    off = (layer.weight.dequantize() - floats).flatten(1).abs()
    assert scale.shape == (8, 1)
    assert bool((off <= 0.501 * scale).all())
    assert bool((off > 0).any())
    x = torch.randn(2, 8, *[4] * rank)
    exact = bitport.dequantize_(copy.deepcopy(layer)).double()
    # sums of 4 * 3 ** rank products at most, each below 4 * 0.3, and the bias
    bound = (4 * 3**rank + 1) ** 2 * 1.2 * 2.0**-24
    torch.testing.assert_close(layer(x).double(), exact(x.double()), rtol=0, atol=bound)


def test_schemes_that_round_inputs_leave_them() -> None:
    plan = bitport.plan(nn.ModuleList([nn.ConvTranspose1d(4, 4, 3), nn.Linear(4, 4)]), {"*": "int8-dyn"})
    assert [choice.name for choice in plan.quantized] == ["1.weight"]
    assert "convolutions are weight-only" in plan["0.weight"].reason
