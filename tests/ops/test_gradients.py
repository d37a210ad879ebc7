"""Gradients of the input and the bias, against autograd through the float64 value of the weight.

Rounding of the input passes the gradient straight through, so the reference differentiates the product alone.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from bitport.numerics import sqnr
from bitport.ops import OPS, Op, Sample
from bitport.ops.grouped import masked
from bitport.ops.quantized_matmul import _dense
from bitport.ops.reference import value_of
from bitport.ops.samples import generator, independent, product_budget, rounding_budget
from bitport.ops.weight import Weight

CPU = torch.device("cpu")


def value(weight: Weight) -> torch.Tensor:
    return value_of(weight.plain(), *weight.matrix)


def cases(name: str, dtype: torch.dtype) -> list[Sample]:
    return [s for s in OPS[name].samples(CPU, dtype) if s.args[0].numel()]


def gradients(op: Op, sample: Sample) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(gradient of the input, gradient of the bias, incoming gradient), where the incoming one is random."""
    args = list(sample.args)
    leaves = [0] + ([op.bias_at] if op.bias_at is not None and args[op.bias_at] is not None else [])
    for at in leaves:
        args[at] = args[at].detach().clone().requires_grad_()
    y = op.overload(*args)
    incoming = torch.randn(y.shape, generator=generator(sample.name)).to(y.dtype)
    y.backward(incoming)
    return args[0].grad, args[leaves[-1]].grad if len(leaves) > 1 else None, incoming


def same_scale_budget(dtype: torch.dtype) -> float:
    """The budget with one scale for all: equal codes are rounded alike, so the weight's errors are not random, and each
    may be the largest, 2^-p. The rounding of the result is as in product_budget."""
    return rounding_budget(dtype) - 10 * math.log10(1 + 0.72**2 / 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["linear", "dyn_linear"])
def test_products(name: str, dtype: torch.dtype) -> None:
    for sample in cases(name, dtype)[::3]:
        grad, bias, incoming = gradients(OPS[name], sample)
        weight = Weight(*sample.args[1:11])
        exact = incoming.double() @ value(weight)
        budget = product_budget(dtype, weight.n, independent(incoming.numel() // weight.n, weight.k))
        if weight.scale.numel() == 1:
            budget = min(budget, same_scale_budget(dtype))
        assert grad.dtype == dtype
        assert grad.shape == sample.args[0].shape
        assert float(sqnr(exact, grad)) >= budget, sample.name
        if bias is not None:
            rows = incoming.double().reshape(-1, weight.n).sum(0)
            count = max(8, incoming.numel() // weight.n)
            least = min(product_budget(each, count, weight.n) for each in (dtype, bias.dtype))
            assert float(sqnr(rows, bias)) >= least, sample.name


@pytest.mark.parametrize("name", ["grouped_linear", "dyn_grouped_linear"])
def test_grouped_products(name: str) -> None:
    for sample in cases(name, torch.float32)[::4]:
        grad, _, incoming = gradients(OPS[name], sample)
        weight = Weight(*sample.args[2:12])
        exact = masked(incoming.double(), sample.args[1], value(weight).transpose(-1, -2))
        assert float(sqnr(exact, grad)) >= product_budget(torch.float32, weight.n, grad.numel()), sample.name
        last = int(sample.args[1][-1])
        assert not grad[last:].any(), "rows of no expert have no gradient"


def test_quantized_matmul() -> None:
    for sample in cases("quantized_matmul", torch.float32):
        grad, _, incoming = gradients(OPS["quantized_matmul"], sample)
        dense = _dense(*sample.args[1:4], torch.float64)
        exact = incoming.double() @ dense.T
        assert float(sqnr(exact, grad)) >= product_budget(torch.float32, dense.shape[1], grad.numel()), sample.name


def test_only_what_is_asked_for_is_computed() -> None:
    sample = cases("linear", torch.float32)[0]
    x, bias = sample.args[0], sample.args[-1].clone().requires_grad_()
    y = OPS["linear"].overload(x, *sample.args[1:-1], bias)
    y.sum().backward()
    assert torch.equal(bias.grad, torch.full_like(bias, y.numel() / y.shape[-1]))
    assert x.grad is None


def test_a_second_derivative() -> None:
    """The second derivative of |y|^2 with linear y is 2 W^T W."""
    from bitport.schemes import preset
    from bitport.tensor import quantize_tensor

    weight = quantize_tensor(torch.randn(8, 32), preset("int4-g32"))
    dense = weight.dequantize()
    x = torch.randn(32, requires_grad=True)
    hessian = torch.autograd.functional.hessian(lambda z: F.linear(z, weight).square().sum(), x)
    torch.testing.assert_close(hessian, 2 * dense.T @ dense, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", ["int4-g32", "int8-dyn"])
def test_function_transforms_of_experts(scheme: str) -> None:
    """The transposed view is made inside the transformed function, as transformers does."""
    from bitport.tensor import quantize_tensor

    weight, offs = quantize_tensor(torch.randn(3, 32, 64), scheme), torch.tensor([2, 2, 5], dtype=torch.int32)
    x = torch.randn(5, 64, requires_grad=True)

    def loss(z: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(z, weight.mT, offs=offs).square().sum()

    one, (other,) = torch.func.grad(loss)(x.detach()), torch.autograd.grad(loss(x), x)
    torch.testing.assert_close(one, other, rtol=64 * 2**-23, atol=1e-5)  # two sums of 64 products in different order
