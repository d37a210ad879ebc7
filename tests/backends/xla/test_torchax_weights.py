"""What models do with weights besides F.linear, on torchax's device: slice, join, dequantize and group them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitport
from bitport.backends.xla import torchax_ops
from bitport.backends.xla.move import to_array, to_tensor
from bitport.errors import ArgumentError
from bitport.numerics import sqnr
from bitport.ops import samples, use_kernel
from bitport.schemes import PRESETS
from bitport.tensor import QTensor

pytestmark = pytest.mark.xla

ENV = torchax_ops.register().default_env()
N, K, EXPERTS, ROWS = 64, 128, 3, 6
SCHEMES = ["int4-g32", "int8", "nf4", "fp8-row", "mxfp4", "nvfp4"]


class Uses(nn.Module):
    """A model that computes ``use(x, weight)`` with a weight [N, K], or experts [E, N, K]."""

    def __init__(self, use: Callable[..., Tensor], experts: bool = False) -> None:
        super().__init__()
        self.use = use
        self.layer = Experts() if experts else nn.Linear(K, N, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.layer.weight)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, N, K) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x


def on_torchax(x: Tensor) -> Tensor:
    return torchax_ops.wrap(to_array(x))


def levels(model: nn.Module, scheme: str) -> list[float]:
    """SQNR in dB of the eager and the compiled model, against the CPU's generic kernels."""
    bitport.quantize_(model, scheme)
    x = torch.randn(ROWS, K)
    with torch.no_grad(), use_kernel("generic"):
        expected = model(x).double()
    moved = torchax_ops.to_jax(copy.deepcopy(model))
    with ENV:
        eager = to_tensor(moved(on_torchax(x)).jax())
    state, function = torchax_ops.as_function(model)
    return [float(sqnr(expected, got)) for got in (eager, to_tensor(jax.jit(function)(state, to_array(x))))]


def least() -> float:
    """The budget of one product, less 3 dB since both sides are rounded."""
    return samples.product_budget(torch.float32, K, ROWS * N) - 3


CUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda w: w[:32],
    "rows from": lambda w: w[32:],
    "columns": lambda w: w[:, :64],
    "last columns": lambda w: w[..., 64:],
    "chunk": lambda w: w.chunk(2)[1],
    "split": lambda w: torch.split(w, [16, 48])[1],
    "narrow": lambda w: w.narrow(0, 16, 16),
    "a batch of one": lambda w: w[None][0],
    "turned twice": lambda w: w.T.T,
    "joined": lambda w: torch.cat([w[32:], w[:32]]),
    "dequantized": lambda w: w.dequantize(),
}


# Joining compares the values of global scales, which are unknown while JAX compiles: no joined nvfp4.
PIECES = [(name, scheme) for name in CUTS for scheme in SCHEMES if (name, scheme) != ("joined", "nvfp4")]


@pytest.mark.parametrize(("name", "scheme"), PIECES)
def test_pieces(name: str, scheme: str) -> None:
    def use(x: Tensor, w: Tensor) -> Tensor:
        piece = CUTS[name](w)
        return F.linear(x[:, : piece.shape[-1]], piece)

    found = levels(Uses(use), scheme)
    assert min(found) > least(), found


ENDS = torch.tensor([2, 2, 5], dtype=torch.int32)


def ends_beside(x: Tensor) -> Tensor:
    return on_torchax(ENDS) if x.device.type == "jax" else ENDS


GROUPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "grouped": lambda x, w: F.grouped_mm(x, w.mT, offs=ends_beside(x))[:5],
    "grouped along N": lambda x, w: F.grouped_mm(x[:, :N], w, offs=ends_beside(x))[:5],
    "bmm": lambda x, w: torch.bmm(x.reshape(EXPERTS, -1, K), w.mT),
    "one": lambda x, w: F.linear(x, w[1]),
    "some": lambda x, w: torch.bmm(x.reshape(EXPERTS, -1, K)[1:], w[ends_beside(x)[:2]].mT),
    "in a loop": lambda x, w: torch.stack([F.linear(x, each) for each in w.unbind()]),
}


@pytest.mark.parametrize("scheme", [*SCHEMES, "int8-dyn", "fp8-block", "mxfp8"])
@pytest.mark.parametrize("name", GROUPS)
def test_experts(name: str, scheme: str) -> None:
    found = levels(Uses(GROUPS[name], experts=True), scheme)
    assert min(found) > least(), found


@pytest.mark.parametrize("scheme", sorted(set(PRESETS) - {"int8-static"}))
def test_dequantize_gives_the_floats_of_the_cpu(scheme: str) -> None:
    """In float32 a value is a product of few factors: at most two ulps apart."""
    layer = nn.Linear(K, N)
    bitport.quantize_(nn.Sequential(layer), scheme)
    expected = layer.weight.dequantize().detach().numpy()
    torchax_ops.to_jax(layer)
    with ENV:
        got = to_tensor(layer.weight.dequantize().jax()).numpy()
    np.testing.assert_array_max_ulp(got, expected, 2)


@pytest.mark.parametrize("scheme", ["int8", "int4", "int4-int8"])
def test_weights_move_within_inference_mode(scheme: str) -> None:
    """In inference mode torchax turns a bitwise ``&`` of integers into a logical one, unless told otherwise."""
    layer = nn.Linear(K, N)
    bitport.quantize_(nn.Sequential(layer), scheme)
    before = copy.deepcopy(layer.weight)
    with torch.inference_mode():
        torchax_ops.to_jax(layer)
        torchax_ops.to_cpu(layer)
    assert torch.equal(layer.weight, before)


def test_what_a_qtensor_cannot_be_indexed_by() -> None:
    layer = nn.Linear(K, N)
    bitport.quantize_(nn.Sequential(layer), "int4-g32")
    torchax_ops.to_jax(layer)
    for index in ([0, 1], True, (0, [1])):
        with ENV, pytest.raises(ArgumentError, match="indexed by one tensor, or by ints, slices"):
            layer.weight[index]
    with ENV, pytest.raises(ArgumentError, match="must begin and end at multiples of 32"):
        layer.weight[:, 3:]


def test_grouped_products_that_are_not_there_are_refused() -> None:
    x, w = on_torchax(torch.randn(ROWS, K)), on_torchax(torch.randn(EXPERTS, K, N))
    with ENV, pytest.raises(ArgumentError, match=r"takes x \[T, K\], w \[E, K, N\] and offs"):
        F.grouped_mm(x.reshape(EXPERTS, -1, K), w)


def test_bytes_seen_as_another_dtype() -> None:
    x = torch.arange(-4, 4, dtype=torch.int32).reshape(2, 4)
    for dtype in (torch.uint8, torch.int16, torch.float32, torch.float8_e4m3fn):
        with ENV:
            there = on_torchax(x).view(dtype)
            back = there.view(torch.int32)
        assert there.dtype == dtype
        assert np.array_equal(np.asarray(there.jax()).view(np.uint8), x.view(torch.uint8).numpy())
        assert torch.equal(to_tensor(back.jax()), x)


@pytest.mark.parametrize("scheme", ["int4", "fp8-row", "mxfp4"])
def test_weights_on_the_cpu_stay_there(scheme: str) -> None:
    layer, x = nn.Linear(K, N, bias=False), torch.randn(ROWS, K)
    bitport.quantize_(nn.Sequential(layer), scheme)
    expected = layer(x)
    with ENV:
        got = layer(x)
    assert torch.equal(got, expected)


def test_views_of_other_tensors_are_written_through() -> None:
    x = on_torchax(torch.zeros(3, 4))
    with ENV:
        x[1][2].add_(1)
    expected = torch.zeros(3, 4)
    expected[1, 2] = 1
    assert torch.equal(to_tensor(x.jax()), expected)


def test_explain_names_the_kernel() -> None:
    model = nn.Sequential(nn.Linear(K, N), nn.Linear(N, 32))
    bitport.quantize_(model, {"0": "int4-g32", "1": "int8-dyn"})
    text = str(bitport.explain(torchax_ops.to_jax(model)))
    assert text.count("jax:0") == 2
    assert "generic" not in text


def test_a_forced_kernel_runs() -> None:
    weight = nn.Linear(K, N, bias=False)
    bitport.quantize_(nn.Sequential(weight), "int4-g32")
    x = torch.randn(ROWS, K)
    expected = weight(x).detach().double()
    torchax_ops.to_jax(weight)
    assert isinstance(weight.weight, QTensor)
    with ENV, use_kernel("jax"):
        got = to_tensor(weight(on_torchax(x)).jax())
    assert float(sqnr(expected, got)) > least()
