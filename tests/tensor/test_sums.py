"""Adding floats to a quantized weight, as DoRA does for its norms and PEFT for experts, gives a float tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import bitport
from bitport.tensor import QTensor

Make = Callable[..., QTensor]
SUMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "right": lambda w, delta: w + delta,
    "left": lambda w, delta: delta + w,
    "alpha": lambda w, delta: torch.add(w, delta, alpha=0.5),
    "transposed": lambda w, delta: w.t() + delta.t(),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("how", SUMS)
def test_a_sum_with_floats_of_its_shape_is_that_of_the_value(make: Make, how: str, compiled: bool) -> None:
    w, delta = make(dtype=torch.bfloat16), torch.randn(64, 96, requires_grad=True)
    wanted = SUMS[how](w.dequantize().double(), delta.double())
    torch.compiler.reset()
    run = torch.compile(SUMS[how], backend="aot_eager", fullgraph=True) if compiled else SUMS[how]
    y = run(w, delta)
    assert type(y) is Tensor
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), wanted, rtol=1e-6, atol=1e-6)
    (gradient,) = torch.autograd.grad(y.sum(), delta)
    assert torch.equal(gradient, torch.full_like(delta, 0.5 if how == "alpha" else 1.0))


def test_products_are_added_to_a_stack_of_experts(make: Make) -> None:
    """torch.baddbmm(W, A, B) and addmm with only the added matrix quantized."""
    w, a, b = make("int4-g32", 3, 64, 96), torch.randn(3, 64, 4), torch.randn(3, 4, 96)
    y = torch.baddbmm(w, a, b, alpha=2, beta=0.5)
    wanted = 0.5 * w.dequantize().double() + 2 * a.double() @ b.double()
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)
    matrix = torch.addmm(make(), a[0], b[0])
    assert type(matrix) is Tensor


@pytest.mark.parametrize(
    "summed",
    [
        pytest.param(lambda w: w + 1, id="number"),
        pytest.param(lambda w: w + torch.ones(96), id="row"),
        pytest.param(lambda w: w + torch.ones(2, 64, 96), id="batch"),
        pytest.param(lambda w: w + w, id="itself"),
        pytest.param(lambda w: w.add_(torch.ones(64, 96)), id="in-place"),
    ],
)
def test_other_sums_are_refused(make: Make, summed: Callable[[QTensor], Tensor]) -> None:
    with pytest.raises(NotImplementedError, match=r"is not defined on a QTensor.*bitport.dequantize_\(model\)"):
        summed(make())


class LowRank(nn.Module):
    """An adapter that is a parametrization of a weight."""

    def __init__(self, n: int, k: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, k)), nn.Parameter(torch.randn(n, 4))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


def test_an_adapter_is_merged_by_parametrize_once_the_model_is_a_float_one() -> None:
    """dequantize_ took every parametrization of a quantized weight for learned scales, and asked for convert_."""
    layer, x = nn.Linear(96, 64), torch.randn(3, 96)
    bitport.quantize_(layer, "int4-g32")
    parametrize.register_parametrization(layer, "weight", LowRank(64, 96))
    value = layer.weight.double()
    wanted = F.linear(x.double(), value, layer.bias.double())
    for _ in ("quantized", "float"):
        torch.testing.assert_close(layer(x).double(), wanted, rtol=1e-5, atol=1e-5)
        bitport.dequantize_(layer)
    parametrize.remove_parametrizations(layer, "weight")
    assert torch.equal(layer.weight.double(), value)
