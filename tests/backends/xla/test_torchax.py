"""torch programs with quantized weights on JAX, eager, compiled and exported, give the numbers of the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable

import jax
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitport
from bitport.backends.xla import torchax_ops
from bitport.backends.xla.move import to_array, to_tensor
from bitport.nn import QuantizedLinear
from bitport.numerics import sqnr
from bitport.ops import OPS, samples, use_kernel
from bitport.schemes import PRESETS
from bitport.tensor import QTensor

from .arrays import CPU

pytestmark = pytest.mark.xla

TORCHAX = torchax_ops.register()
ENV = TORCHAX.default_env()
SCHEMES = sorted(set(PRESETS) - {"int8-static"})  # needs calibration; its op is among the samples


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 128)
        self.up, self.down = nn.Linear(128, 96), nn.Linear(96, 128, bias=False)
        self.register_buffer("shift", torch.randn(128))

    def forward(self, ids: Tensor) -> Tensor:
        return self.down(F.silu(self.up(self.embedding(ids) + self.shift)))


IDS = torch.tensor([[3, 1, 7], [0, 39, 2]])


def quantized(scheme: str) -> tuple[nn.Module, Tensor, float]:
    """A model, its result on the CPU by the generic kernels, and the least SQNR in dB of another device's result.

    Two products follow each other, each within its budget; where inputs are rounded, an ulp in the first result may
    move an input of the second product across the border between two codes, which costs a step of its scale.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = Model().eval()
    bitport.quantize_(model, {"embedding": "int8", "*": scheme})
    with torch.no_grad(), use_kernel("generic"):
        expected = model(IDS)
    rounds = PRESETS[scheme].act
    return model, expected, 40.0 if rounds else samples.product_budget(torch.float32, 128, expected.numel()) - 3


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model(scheme: str) -> None:
    model, expected, budget = quantized(scheme)
    state, function = torchax_ops.from_export(model, (IDS,))
    exported = to_tensor(jax.jit(function)(state, (to_array(IDS),))[0])
    moved = torchax_ops.to_jax(copy.deepcopy(model))
    with ENV:
        eager = to_tensor(moved(torchax_ops.wrap(to_array(IDS))).jax())
    state, function = torchax_ops.as_function(model)
    compiled = to_tensor(jax.jit(function)(state, to_array(IDS)))
    levels = [float(sqnr(expected.double(), got)) for got in (exported, eager, compiled)]
    assert min(levels) > budget, levels


@pytest.mark.parametrize("scheme", ["int4", "int8", "mxfp4", "nvfp4"])
def test_weights_lie_as_the_device_wants_them(scheme: str) -> None:
    model, _, _ = quantized(scheme)
    weight = torchax_ops.to_jax(model).up.weight
    assert weight.device.type == "jax"
    assert weight.bits_layout == ("k_major" if scheme in ("int4", "int8") else "plain")
    assert "float8" not in str(weight.scale.jax().dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_quantized_matmul_in_model_code(dtype: torch.dtype) -> None:
    """torch.ops.bitport.quantized_matmul on torchax tensors, eager and compiled by torchax's own jit."""
    op = torch.ops.bitport.quantized_matmul
    compiled = TORCHAX.interop.jax_jit(
        lambda x, w, s, z, b, four, act: op(x, w, s, z, b, four, act),
        kwargs_for_jax_jit={"static_argnums": (4, 5, 6)},
    )
    for sample in OPS["quantized_matmul"].samples(CPU, dtype):
        args = [torchax_ops.wrap(to_array(arg)) if isinstance(arg, Tensor) else arg for arg in sample.args]
        with ENV:
            results = [op(*args), compiled(*args)]
        for result in results:
            assert result.dtype == dtype
            assert float(sqnr(sample.expected(), to_tensor(result.jax()))) >= sample.budget, sample.name


class Composed(nn.Module):
    """Layers whose functions are composed of products."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 24, num_layers=2, bidirectional=True, proj_size=16, batch_first=True)
        self.gru, self.cell = nn.GRU(32, 32), nn.RNNCell(32, 32)
        self.encoder = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)

    def forward(self, x: Tensor, hidden: Tensor, cell: Tensor, padding: Tensor) -> list[Tensor]:
        y, (hidden, cell) = self.lstm(x, (hidden, cell))
        z = self.encoder(self.gru(x)[0], src_key_padding_mask=padding)
        return [y, hidden, cell, z, self.cell(x[0], z[1])]


@pytest.mark.parametrize("scheme", ["int8", "int8-dyn"])
def test_layers_that_are_composed_of_others(scheme: str) -> None:
    """Sums of 64 products at most, each rounded by 2^-24 of a size below 5, through several layers; an input that is
    rounded may get the code beside, as above."""
    model = Composed().eval()
    bitport.quantize_(model, {"*": scheme})
    padding = torch.tensor([[False] * 4, [False] * 3 + [True]])
    given = torch.randn(2, 4, 32), torch.randn(4, 2, 16), torch.randn(4, 2, 24), padding
    arrays = [to_array(each) for each in given]
    with torch.no_grad(), use_kernel("generic"):
        expected = model(*given)
    state, function = torchax_ops.from_export(model, given)
    results = [jax.jit(function)(state, tuple(arrays))]
    state, function = torchax_ops.as_function(model)
    results.append(jax.jit(function)(state, *arrays))
    for result in results:
        for made, wanted in zip(map(to_tensor, result), expected, strict=True):
            torch.testing.assert_close(made, wanted, rtol=0, atol=1e-4 if scheme == "int8" else 2e-2)


def test_a_layer_loaded_with_ready_made_weights() -> None:
    """As on the PyTorch/XLA page: blocks of 32, with a zero point in units of the result."""
    torch.manual_seed(0)
    n, k, block = 24, 96, 32
    codes = torch.randint(-8, 8, (k // block, block, n), dtype=torch.int8)
    scaler, zero = torch.rand(k // block, n) + 0.5, torch.randn(k // block, n)
    layer = QuantizedLinear(k, n, "int4-g32-fzero")
    layer.load_quantized_weight(codes, scaler, zero)
    x = torch.randn(5, k)
    expected = torch.ops.bitport.quantized_matmul(x.double().float(), codes, scaler, zero, block, True)
    state, function = torchax_ops.as_function(layer)
    assert state["weight"]["qdata"].shape == (k, n // 2)
    got = to_tensor(jax.jit(function)(state, to_array(x)))
    # The zero point in codes is a rounded quotient: two more roundings than in quantized_matmul.
    assert float(sqnr(expected.double(), got)) > samples.product_budget(torch.float32, k, got.numel()) - 6


def test_functions_of_other_tensors_are_torchaxs() -> None:
    x, w = torch.randn(3, 8), torch.randn(4, 8)
    with ENV:
        y = F.linear(torchax_ops.wrap(to_array(x)), torchax_ops.wrap(to_array(w)))
        row = torchax_ops.wrap(to_array(x))[1]
    torch.testing.assert_close(to_tensor(y.jax()), x @ w.T)
    assert torch.equal(to_tensor(row.jax()), x[1])


class First(nn.Module):
    """A layer, of whose results the first one is returned."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y[0] if isinstance(y, tuple) else y


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv": (lambda: nn.Conv2d(8, 12, (2, 3), (2, 1), (1, 0), (1, 2), groups=2), (2, 8, 5, 6)),
    "transposed": (lambda: nn.ConvTranspose1d(16, 6, 3, stride=2, padding=1, output_padding=1), (2, 16, 4)),
    "transposed in groups": (
        lambda: nn.ConvTranspose2d(8, 12, (2, 3), (2, 1), (1, 0), (1, 0), 2, dilation=(1, 2)),
        (2, 8, 3, 4),
    ),
    "lstm": (lambda: nn.LSTM(16, 8, batch_first=True, bidirectional=True), (2, 3, 16)),
}
RECURRENT = 70.0
"""Least SQNR in dB of three steps. Each has two products and five other functions, each within 2^-20 for numbers below
one, and passes on at most what it was given: 21 * 2^-20 in all, where the root mean square of the results is 0.1."""


@pytest.mark.parametrize("name", LAYERS)
def test_other_layers(name: str) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    model, x = First(make()).eval(), torch.randn(shape)
    bitport.quantize_(model, {"*": "int8"})
    judge = bitport.dequantize_(copy.deepcopy(model)).double()
    expected = judge(x.double()).detach()
    state, function = torchax_ops.from_export(model, (x,))
    exported = to_tensor(jax.jit(function)(state, (to_array(x),))[0])
    moved = torchax_ops.to_jax(copy.deepcopy(model))
    with ENV:
        eager = to_tensor(moved(torchax_ops.wrap(to_array(x))).jax())
    state, function = torchax_ops.as_function(model)
    compiled = to_tensor(jax.jit(function)(state, to_array(x)))
    budget = RECURRENT if name == "lstm" else samples.product_budget(torch.float32, 48, expected.numel()) - 3
    levels = [float(sqnr(expected, got)) for got in (exported, eager, compiled)]
    assert min(levels) > budget, levels


def test_exporting_leaves_the_model_as_it_was() -> None:
    model, _, _ = quantized("int4")
    before = {name: id(param) for name, param in model.named_parameters()}
    torchax_ops.from_export(model, (IDS,))
    assert {name: id(param) for name, param in model.named_parameters()} == before


def dtypes(q: QTensor) -> list[torch.dtype | None]:
    return [None if part is None else part.dtype for part in q.parts]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_there_and_back(scheme: str) -> None:
    """Every bit, every dtype, and the CPU's own layout."""
    model, _, _ = quantized(scheme)
    before = {name: copy.deepcopy(param) for name, param in model.named_parameters()}
    torchax_ops.to_cpu(torchax_ops.to_jax(model))
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name])
        if isinstance(param, QTensor):
            other = before[name]
            assert param.bits_layout == other.bits_layout
            assert dtypes(param) == dtypes(other)


def test_tied_weights_stay_tied() -> None:
    model = Model()
    model.down.weight = model.up.weight
    torchax_ops.to_jax(model)
    assert model.down.weight is model.up.weight
