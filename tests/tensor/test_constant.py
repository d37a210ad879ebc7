"""A quantized weight is a constant: it gets no gradient, however one is requested and whatever records the graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitport
from bitport.tensor import QTensor

Make = Callable[..., QTensor]

RECORDED_BY_TORCH: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "inner": lambda x, w: torch.inner(x, w),
    "tensordot": lambda x, w: torch.tensordot(x, w, ([1], [1])),
    "multi_dot": lambda x, w: torch.linalg.multi_dot([x, w.t()]),
    "aten-linear": lambda x, w: torch.ops.aten.linear(x, w),
    "embedding": lambda x, w: x + torch.embedding(w, torch.arange(5)),
    "list": lambda x, w: x * w[[0, 1, 2, 3, 4]],
    "mask": lambda x, w: x * w[torch.arange(64) < 5],
    "sum": lambda x, w: (w + x.new_ones(64, 96)) @ x.t(),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("function", RECORDED_BY_TORCH)
def test_gradients_reach_the_input_alone(make: Make, function: str, compiled: bool) -> None:
    weight, x = nn.Parameter(make()), torch.randn(5, 96, requires_grad=True)
    torch.compiler.reset()
    run = torch.compile(RECORDED_BY_TORCH[function], backend="aot_eager") if compiled else RECORDED_BY_TORCH[function]
    y = run(x, weight)
    (gradient,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (wanted,) = torch.autograd.grad(RECORDED_BY_TORCH[function](x, weight.dequantize()).sum(), x)
    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-4)
    y.sum().backward()
    assert weight.grad is None


def test_attention_is_trained_but_for_its_weights() -> None:
    """torch itself slices the weights of attention."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    bitport.quantize_(layer, "int4-g32")
    with pytest.warns(UserWarning, match="is a constant"):
        layer.requires_grad_(True)
    optimizer = torch.optim.AdamW(layer.parameters())
    before = layer.self_attn.in_proj_weight.clone()
    layer(torch.randn(2, 5, 64)).sum().backward()
    optimizer.step()
    assert torch.equal(layer.self_attn.in_proj_weight, before)
    for param in layer.parameters():
        assert (param.grad is None) == isinstance(param, QTensor)


def test_who_asks_for_gradients_of_a_constant_is_told(make: Make) -> None:
    layer = nn.Linear(64, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.weight = nn.Parameter(make("int4-g32", 8, 64))
        layer.requires_grad_(False)
        layer.weight.requires_grad = False
    with pytest.warns(UserWarning, match=r"is a constant.*train.prepare_"):
        layer.requires_grad_()
    with pytest.warns(UserWarning, match=r"is a constant.*train.prepare_"):
        layer.weight.requires_grad = True
    assert not layer.weight.requires_grad
    F.linear(torch.randn(3, 64), layer.weight, layer.bias).sum().backward()
    assert layer.weight.grad is None
