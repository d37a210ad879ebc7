"""Autocast, casts and inference_mode: rounding always starts from the weight's own value."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitport
from bitport.errors import ArgumentError
from bitport.numerics import sqnr
from bitport.schemes import preset
from bitport.tensor import quantize_tensor
from bitport.train import TrainedTensor, convert_, prepare_
from bitport.train.tensor import Rounding


def trained(*shape: int, scheme: str) -> nn.Parameter:
    return nn.Parameter(TrainedTensor(torch.randn(shape), Rounding(preset(scheme))))


OFFS = torch.tensor([2, 8, 8, 12], dtype=torch.int32)
PRODUCTS = {
    "batched": lambda w, x: torch.bmm(x.reshape(4, 3, 64), w.mT),
    "grouped": lambda w, x: F.grouped_mm(x, w.mT, offs=OFFS),
    "matrix": lambda w, x: F.linear(x, w[1]),
    "cast by hand": lambda w, x: F.linear(x.bfloat16(), w[1].to(torch.bfloat16)),
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_products_under_autocast_are_those_of_the_quantized_weight(product: str) -> None:
    w, x = trained(4, 32, 64, scheme="int4-g32"), torch.randn(12, 64)
    with torch.autocast("cpu", torch.bfloat16):
        y = PRODUCTS[product](w, x)
        want = PRODUCTS[product](quantize_tensor(w.data.value, "int4-g32"), x)  # type: ignore[attr-defined]
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, want)
    y.float().sum().backward()
    assert w.grad is not None
    assert w.grad.dtype == torch.float32


def test_factors_may_be_given_by_the_names_of_torch() -> None:
    w, x = trained(4, 32, 64, scheme="int8-dyn"), torch.randn(4, 3, 64)
    assert torch.equal(torch.bmm(x, mat2=w.mT), torch.bmm(x, w.mT))
    assert torch.equal(x[0].mm(mat2=w[0].t()), x[0].mm(w[0].t()))
    assert torch.equal(torch.mv(w[0], vec=x[0, 0]), torch.mv(w[0], x[0, 0]))
    assert torch.equal(w[0].mv(vec=x[0, 0]), w[0].mv(x[0, 0]))


def test_batched_products_that_round_inputs_keep_the_dtype_of_autocast() -> None:
    w, x = trained(4, 32, 64, scheme="int8-dyn"), torch.randn(4, 3, 64)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        y = torch.bmm(x, w.mT)
        want = torch.bmm(x, quantize_tensor(w.data.value, "int8-dyn").mT)  # type: ignore[attr-defined]
    assert y.dtype == want.dtype == torch.bfloat16
    assert torch.allclose(y.float(), want.float(), rtol=2.0**-7, atol=2.0**-6)


def test_a_convolution_under_autocast_is_the_converted_one() -> None:
    model, x = nn.Sequential(nn.Conv1d(64, 32, 3)), torch.randn(2, 64, 9)
    prepare_(model, [("*", "int4-g32", ("conv",))])
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
        convert_(model)
        assert torch.equal(y, model(x))


def test_a_cast_is_a_copy_in_that_dtype() -> None:
    w = trained(32, 64, scheme="int4-g32")
    value = w.data.value.clone()  # type: ignore[attr-defined]
    with torch.no_grad():
        kept, read = w.to(torch.bfloat16), w.to(torch.bfloat16)
        w.mul_(2)
        assert torch.equal(kept + 0, value.bfloat16())
        assert torch.equal(read.float().add(0), value.bfloat16().float())
        assert torch.equal(kept.mul_(3) + 0, value.bfloat16() * 3)


class Attends(nn.Module):
    """All products that inference_mode does not decompose: linear layers inside a fused op, matmul, a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.conv = nn.Conv1d(64, 64, 1)
        self.turned = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x, x, x, need_weights=False)[0]
        return self.conv(x.mT).mT @ self.turned.weight


def test_inference_mode_rounds_as_training_does() -> None:
    model, x = Attends(), torch.randn(2, 5, 64)
    prepare_(model, [("*", "int4-g32", ("linear", "conv", "attention"))])
    with torch.no_grad():
        want = model(x)
    with torch.inference_mode():
        assert torch.allclose(model(x), want, atol=1e-5)
        assert type(model.state_dict()["conv.weight"]) is Tensor
    model(x).sum().backward()


@pytest.mark.parametrize("given", ["keys", "keys and values"])
@pytest.mark.parametrize("scheme", ["fp8", "nvfp4", "fp8-block"])
def test_attention_to_something_else_is_rounded_as_the_whole(scheme: str, given: str) -> None:
    """torch cuts its weight in three, also where one scale is for all of it, or blocks cross."""
    attention = nn.MultiheadAttention(96, 4, batch_first=True)
    prepare_(attention, dataclasses.replace(preset(scheme), act=""))
    queries, keys = torch.randn(2, 5, 96), torch.randn(2, 7, 96)
    values = torch.randn(2, 7, 96) if given == "keys and values" else keys
    y = attention(queries, keys, values)[0]
    y.square().sum().backward()
    grad = attention.in_proj_weight.grad
    assert type(grad) is Tensor
    convert_(attention)
    exact = bitport.dequantize_(copy.deepcopy(attention).double(), torch.float64).requires_grad_()
    doubles = keys.double()
    want = exact(queries.double(), doubles, doubles if values is keys else values.double())[0]
    want.square().sum().backward()
    assert sqnr(want, y) > 110  # float32: 2^-24 of a number, and of sums over some hundred
    assert sqnr(exact.in_proj_weight.grad, grad) > 110


VECTORS = {
    "w v": (lambda w, v: w @ v, 64),
    "mv": (lambda w, v: torch.mv(w, v), 64),
    "v w": (lambda w, v: v @ w, 32),
    "w^T v": (lambda w, v: w.t().mv(v), 32),
    "v w^T": (lambda w, v: torch.matmul(v, w.t()), 64),
    "many w": (lambda w, v: v.expand(2, 3, 32) @ w, 32),
}


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("name", VECTORS)
def test_products_with_vectors(name: str, recorded: bool) -> None:
    product, size = VECTORS[name]
    w, v = trained(32, 64, scheme="int4-g32"), torch.randn(size)
    q = quantize_tensor(w.data.value, "int4-g32")  # type: ignore[attr-defined]
    with torch.set_grad_enabled(recorded):
        for weight in (w, q):
            assert torch.allclose(product(weight, v), product(q.dequantize(), v), atol=1e-4)


BATCHES = {
    "batch of one": (lambda w, x: x @ w[None].mT, (32, 64)),
    "repeated": (lambda w, x: x @ w.t().expand(4, 64, 32), (32, 64)),
    "repeated in bmm": (lambda w, x: torch.bmm(x.expand(4, 3, 64), w.t().expand(4, 64, 32)), (32, 64)),
    "one input for all experts": (lambda w, x: x @ w.mT, (4, 32, 64)),
    "one vector for all experts": (lambda w, x: w @ x[0], (4, 32, 64)),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("scheme", ["int4-g32", "int8-dyn", "nvfp4"])
@pytest.mark.parametrize("name", BATCHES)
def test_products_over_a_batch(name: str, scheme: str, mode: Callable[[], Any]) -> None:
    """They must neither be refused while gradients are recorded nor use the float values otherwise."""
    product, shape = BATCHES[name]
    w, x = trained(*shape, scheme=scheme), torch.randn(3, 64)
    q = quantize_tensor(w.data.value, scheme)  # type: ignore[attr-defined]
    with mode():
        y = product(w, x)
        assert torch.allclose(y, product(q, x), rtol=1e-4, atol=1e-4)
    if mode is torch.enable_grad:
        dense = q.dequantize().requires_grad_()
        grads = []
        for weight in (w, dense):
            z = x.clone().requires_grad_()
            product(weight, z).sum().backward()
            grads.append(z.grad)
        assert torch.allclose(*grads, atol=1e-3)
        if not preset(scheme).act:
            assert torch.allclose(w.grad, dense.grad, atol=1e-4)


@pytest.mark.parametrize("recorded", [True, False])
def test_products_without_a_rounded_form_are_refused_always(recorded: bool) -> None:
    """Without recording gradients they would silently use the float values."""
    w, x = trained(32, 64, scheme="int4-g32"), torch.randn(3, 64)
    refused = {
        "einsum": lambda: torch.einsum("bk,nk->bn", x, w),
        "addmv": lambda: torch.addmv(torch.zeros(32), w, x[0]),
        "addmm_": lambda: w.addmm_(torch.randn(32, 3), torch.randn(3, 64)),
        "_addmm_activation": lambda: torch._addmm_activation(torch.zeros(32), x, w.t()),
        "_sparse_mm": lambda: torch.sparse.mm(x.to_sparse(), w.t()),
    }
    for name, call in refused.items():
        with torch.set_grad_enabled(recorded), pytest.raises(ArgumentError, match=f"{name} on a weight in training"):
            call()


@pytest.mark.parametrize("scheme", ["int4-g32", "int8-dyn"])
def test_products_into_a_given_tensor(scheme: str) -> None:
    """TRL's losses compute pieces of the outputs so, within a function of their own, and its gradient."""
    w, x, y = trained(32, 64, scheme=scheme), torch.randn(3, 64), torch.empty(3, 32)
    with torch.no_grad():
        for at in (slice(0, 16), slice(16, 32)):
            torch.mm(x, w[at].t(), out=y[:, at])
    assert torch.equal(y, F.linear(x, w))
    total = torch.randn(3, 32)
    exact = total + F.linear(x, w)
    assert torch.equal(total.addmm_(x, w.t()), exact)
    total.sum().backward()
    assert w.grad is not None
    with torch.no_grad():
        torch.testing.assert_close(
            torch.ones(3, 64).addmm_(y, w), 1 + y @ quantize_tensor(w.floats(), scheme).dequantize()
        )
    with pytest.raises(ArgumentError, match="no derivative"):
        torch.mm(x, w.t(), out=y)


def test_what_is_added_without_weight_does_not_count() -> None:
    w, x = trained(32, 64, scheme="int8-dyn"), torch.randn(3, 64)
    y = torch.addmm(torch.full((32,), torch.nan), x, w.t(), beta=0, alpha=2)
    assert torch.equal(y, 2 * F.linear(x, w))
    assert torch.equal(torch.ones(32).addmm(x, w.t()), F.linear(x, w) + 1)


def test_buffers_of_its_shape_are_floats() -> None:
    """They do not hold the weight's numbers, so gradients may be recorded."""
    w = trained(32, 64, scheme="int4-g32")
    made = [torch.zeros_like(w), torch.ones_like(w), torch.full_like(w, 2), torch.randn_like(w), torch.rand_like(w)]
    made += [w.new_empty(3), w.new_ones(3), w.new_full((3,), 2.0)]
    assert all(type(each) is Tensor for each in made)
