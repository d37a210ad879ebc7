"""The gradient of an eager call, which bypasses the one registered with PyTorch: the same numbers, and x is not
kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bitport.ops import OPS
from bitport.ops.product import operand
from bitport.schemes import preset
from bitport.tensor import QTensor, quantize_tensor

N, K = 24, 96


def weight(scheme: str) -> QTensor:
    return quantize_tensor(torch.randn(N, K, generator=torch.Generator().manual_seed(1)), preset(scheme))


def leaves() -> tuple[Tensor, Tensor]:
    at = torch.Generator().manual_seed(2)
    return torch.randn(2, 3, K, generator=at, requires_grad=True), torch.randn(N, generator=at, requires_grad=True)


def registered(x: Tensor, q: QTensor, bias: Tensor) -> Tensor:
    """The same call through the dispatcher, with the gradient that torch.library holds."""
    if q.scheme.act:
        return OPS["dyn_linear"].overload(x, *operand(q), q.scheme.act, None, bias)
    return OPS["linear"].overload(x, *operand(q), bias)


@pytest.mark.parametrize("scheme", ["int8", "int4-g32", "int8-dyn", "mxfp8", "nf4"])
def test_gradients_are_those_of_the_op(scheme: str) -> None:
    q, (x, bias) = weight(scheme), leaves()
    grad = torch.randn(2, 3, N)
    eager = torch.autograd.grad(F.linear(x, q, bias), (x, bias), grad)
    for mine, theirs in zip(eager, torch.autograd.grad(registered(x, q, bias), (x, bias), grad), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("scheme", ["int4-g32", "int8-dyn"])
def test_gradients_against_float64(scheme: str) -> None:
    """Rounding of the input passes the gradient through, so both schemes have the dense weight's gradient: a float32
    sum of N products, off by at most N * 2^-24 of the sum of magnitudes."""
    q, (x, bias) = weight(scheme), leaves()
    grad = torch.randn(2, 3, N)
    grad_x, grad_bias = torch.autograd.grad(F.linear(x, q, bias), (x, bias), grad)
    dense = q.dequantize().double()
    bound = N * 2.0**-24 * (grad.double().abs() @ dense.abs())
    assert bool(((grad_x.double() - grad.double() @ dense).abs() <= bound).all())
    torch.testing.assert_close(grad_bias.double(), grad.double().sum((0, 1)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("product", [F.linear, registered], ids=["eager", "op"])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_a_bias_of_another_dtype(product: Any, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """The bias gradient is summed in float32, and rounded once if the bias has a narrower dtype."""
    rows, grad = torch.randn(64, K, dtype=dtypes[0]), torch.randn(64, N, dtype=dtypes[0])
    bias = torch.randn(N, dtype=dtypes[1], requires_grad=True)
    product(rows, weight("int8"), bias).backward(grad)
    once = torch.finfo(dtypes[1]).eps / 2 * grad.double().sum(0).abs()
    assert bias.grad is not None
    assert bool(((bias.grad - grad.double().sum(0)).abs() <= once + 64 * 2.0**-24 * grad.double().abs().sum(0)).all())


@pytest.mark.parametrize("wanted", ["x", "bias"])
def test_only_what_is_wanted_gets_a_gradient(wanted: str) -> None:
    q, (x, bias) = weight("int8"), leaves()
    (bias if wanted == "x" else x).requires_grad_(False)
    F.linear(x, q, bias).sum().backward()
    assert (x.grad is not None, bias.grad is not None) == (wanted == "x", wanted == "bias")


def test_second_derivative() -> None:
    """y = W x: the gradient of |y|^2 is 2 W^T W x, and the gradient of its sum is 2 W^T W 1."""
    q, (x, _) = weight("int8"), leaves()
    first = torch.autograd.grad(F.linear(x, q).square().sum(), x, create_graph=True)[0]
    second = torch.autograd.grad(first.sum(), x)[0]
    dense = q.dequantize().double()
    expected = (2 * dense.T @ dense).sum(0).expand(2, 3, K)
    torch.testing.assert_close(second.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_input_is_not_kept() -> None:
    saved: list[Tensor] = []
    q, (x, bias) = weight("int8"), leaves()
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: saved.append(kept) or kept, lambda kept: kept):
        F.linear(x, q, bias)
    assert saved == []


@pytest.mark.parametrize("scheme", ["int8", "int4-g32", "int8-dyn", "fp8-row", "nf4"])
@pytest.mark.parametrize("through", [F.linear, registered])
def test_results_may_be_written_into(scheme: str, through: Any) -> None:
    """In-place ops such as nn.ReLU(inplace=True) work on the result of any kernel. Also for non-contiguous inputs,
    where F.linear returns a view: autograd forbids in-place writes to a view that a Function returns."""
    q, (x, bias) = weight(scheme), leaves()
    for given in (x, x.transpose(0, 1), x[:1, :1]):
        right = F.relu(through(given, q, bias))
        y = through(given, q, bias)
        y.relu_()
        assert torch.equal(y, right)
        grads = [torch.autograd.grad(each.sum(), (x, bias)) for each in (y, right)]
        assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))
