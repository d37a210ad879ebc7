"""nn.TransformerEncoderLayer compiled and exported for inference, where torch calls a fused op."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import bitport
from bitport.numerics import sqnr
from bitport.train import prepare_

LENGTH, WIDTH, HEADS = 5, 64, 4
PADDED = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 0, 1, 1]], dtype=torch.bool)
LATER = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "padded": {"src_key_padding_mask": PADDED},
    "causal": {"src_mask": LATER},
    "of each head": {"src_mask": LATER.expand(2 * HEADS, -1, -1)},
    "both": {"src_mask": LATER, "src_key_padding_mask": PADDED},
    "added": {"src_mask": torch.linspace(-2, 2, LENGTH**2).reshape(LENGTH, LENGTH)},
}


def layer(**given: Any) -> nn.TransformerEncoderLayer:
    made = nn.TransformerEncoderLayer(WIDTH, HEADS, 96, batch_first=True, **given).eval()
    for norm in (made.norm1, made.norm2):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return made


def compiled(model: nn.Module) -> Any:
    torch.compiler.reset()
    return torch.compile(model, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("first", [False, True])
def test_it_is_compiled(first: bool, masks: dict[str, Any]) -> None:
    model = layer(norm_first=first, activation="gelu" if first else "relu")
    bitport.quantize_(model, "int4-g32", measure=False, progress=False)
    exact, x = bitport.dequantize_(copy.deepcopy(model).double(), torch.float64), torch.randn(2, LENGTH, WIDTH)
    in_double = {name: mask.double() if mask.is_floating_point() else mask for name, mask in masks.items()}
    want = exact(x.double(), **in_double)  # with gradients, so that torch takes the single steps
    with torch.no_grad():
        assert sqnr(want, compiled(model)(x, **masks)) > 110  # float32: 2^-24 of a number, and of sums over a hundred


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_several_are_compiled_and_exported(context: Any) -> None:
    model, x = nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False).eval(), torch.randn(2, LENGTH, WIDTH)
    bitport.quantize_(model, "int8-dyn", measure=False, progress=False)
    with context():
        want = model(x)
        assert torch.equal(compiled(model)(x), want)
        assert torch.equal(torch.export.export(model, (x,), strict=True).module()(x), want)


def test_weights_in_training_are_rounded() -> None:
    model, x = layer(), torch.randn(2, LENGTH, WIDTH)
    prepare_(model, "int4-g32")
    with torch.no_grad():
        want = model(x)
        assert torch.equal(compiled(model)(x), want)
        assert torch.equal(torch.export.export(model, (x,), strict=True).module()(x), want)
