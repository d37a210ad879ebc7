"""Recurrent layers by F.linear, in float64 and with quantized weights, against PyTorch's own in float64."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import bitport as bp
from bitport.errors import ArgumentError
from bitport.ops.recurrent import RECURRENT
from bitport.tensor import QTensor

K, WIDTH, SEQUENCES, STEPS = 40, 32, 5, 6
LENGTHS = (3, 7, 1, 7, 5)
LAYERS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": lambda **how: nn.LSTM(K, WIDTH, **how),
    "lstm-projected": lambda **how: nn.LSTM(K, WIDTH, proj_size=20, **how),
    "gru": lambda **how: nn.GRU(K, WIDTH, **how),
    "tanh": lambda **how: nn.RNN(K, WIDTH, **how),
    "relu": lambda **how: nn.RNN(K, WIDTH, nonlinearity="relu", **how),
}
CELLS: dict[str, Callable[..., nn.RNNCellBase]] = {
    "lstm": lambda **how: nn.LSTMCell(K, WIDTH, **how),
    "gru": lambda **how: nn.GRUCell(K, WIDTH, **how),
    "tanh": lambda **how: nn.RNNCell(K, WIDTH, **how),
    "relu": lambda **how: nn.RNNCell(K, WIDTH, nonlinearity="relu", **how),
}
WAYS = [*itertools.product((1, 3), (False, True), (False, True), (False, True))]
"""num_layers, bidirectional, batch_first, bias."""

EXACT = 2.0**-30
"""In float64: its roundings of 2^-53 would have to grow eight million times to reach this, whereas a wrong row, gate or
step changes states by a hundredth and more."""

ROUNDED = 2e-5
"""In float32: a gate is a sum of 72 products, together below 5 in size, and each addition rounds by 2^-24 of it."""


def quantized(layer: nn.Module, scheme: str = "int8") -> nn.Module:
    report = bp.quantize_(nn.ModuleDict({"layer": layer}), {"*": scheme})
    assert not report.skipped
    return layer


def exact(layer: nn.Module) -> nn.Module:
    """With the values of the weights, computed by PyTorch in float64."""
    return bp.dequantize_(copy.deepcopy(layer)).double()


def first_state(layer: nn.RNNBase) -> Any:
    many = layer.num_layers * (2 if layer.bidirectional else 1)
    hidden = torch.randn(many, SEQUENCES, layer.proj_size or WIDTH)
    return (hidden, torch.randn(many, SEQUENCES, WIDTH)) if layer.mode == "LSTM" else hidden


def inputs(layer: nn.RNNBase, form: str) -> Any:
    if form == "packed":
        return pack_sequence([torch.randn(steps, K) for steps in LENGTHS], enforce_sorted=False)
    return torch.randn(SEQUENCES, STEPS, K) if layer.batch_first else torch.randn(STEPS, SEQUENCES, K)


def doubled(given: Any) -> Any:
    return tuple(map(doubled, given)) if type(given) is tuple else None if given is None else given.to(torch.float64)


def tensors(result: Any) -> list[Tensor]:
    """Those of a result, without the lengths and order of packed sequences."""
    if isinstance(result, PackedSequence):
        return [result.data]
    return [result] if isinstance(result, Tensor) else [each for part in result for each in tensors(part)]


def assert_near(result: Any, wanted: Any, bound: float) -> None:
    for one, other in zip(tensors(result), tensors(wanted), strict=True):
        assert one.shape == other.shape
        assert float((one.detach().double() - other.detach()).abs().max()) < bound


@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_functions_of_pytorch(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64 the modules give the same by our functions as by PyTorch's."""
    for num_layers, bidirectional, batch_first, bias in WAYS:
        how = {"bidirectional": bidirectional, "batch_first": batch_first, "bias": bias}
        layer = LAYERS[name](num_layers=num_layers, **how).double()
        for state in (None, doubled(first_state(layer))):
            x = doubled(inputs(layer, form))
            wanted = layer(x, state)
            with monkeypatch.context() as patch:
                for fn, ours in RECURRENT.items():
                    patch.setattr(torch._VF, fn.__name__, ours)
                made = layer(x, state)
            assert_near(made, wanted, EXACT)


@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize("name", LAYERS)
def test_quantized_layers(name: str, form: str) -> None:
    for num_layers, bidirectional, batch_first, bias in WAYS:
        how = {"bidirectional": bidirectional, "batch_first": batch_first, "bias": bias}
        layer = quantized(LAYERS[name](num_layers=num_layers, **how))
        x, state = inputs(layer, form), first_state(layer)
        for given in (None, state):
            assert_near(layer(x, given), exact(layer)(doubled(x), doubled(given)), ROUNDED)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", CELLS)
def test_quantized_cells(name: str, bias: bool) -> None:
    cell = quantized(CELLS[name](bias=bias))
    for x in (torch.randn(SEQUENCES, K), torch.randn(K)):
        state = cell(x)
        assert_near(state, exact(cell)(x.double()), ROUNDED)
        assert_near(cell(x, state), exact(cell)(x.double(), doubled(state)), ROUNDED)


def test_a_sequence_without_a_batch() -> None:
    layer, x = quantized(LAYERS["lstm"]()), torch.randn(STEPS, K)
    assert_near(layer(x), exact(layer)(x.double()), ROUNDED)


@pytest.mark.parametrize("weight", ["weight_ih_l0", "weight_hh_l0"])
def test_one_weight_of_a_layer(weight: str) -> None:
    layer, x = nn.LSTM(K, WIDTH), torch.randn(STEPS, SEQUENCES, K)
    bp.quantize_(nn.ModuleDict({"layer": layer}), {f"layer.{weight}": "int8"})
    assert [type(each) is QTensor for each in layer._flat_weights] == [weight == name for name in layer._all_weights[0]]
    assert_near(layer(x), exact(layer)(x.double()), ROUNDED)


@pytest.mark.parametrize("scheme", ["int8-dyn", "mxfp4"])
def test_inputs_and_states_are_rounded(scheme: str) -> None:
    """Step by step as by linear layers."""
    cell, x = quantized(nn.RNNCell(64, 64), scheme), torch.randn(3, 64)
    state = torch.randn(3, 64)
    by_hand = nn.functional.linear(x, cell.weight_ih, cell.bias_ih)
    by_hand = torch.tanh(by_hand + nn.functional.linear(state, cell.weight_hh, cell.bias_hh))
    assert torch.equal(cell(x, state), by_hand)
    floats = torch.tanh(x @ cell.weight_ih.dequantize().t() + state @ cell.weight_hh.dequantize().t())
    assert not torch.allclose(cell(x, state), floats + cell.bias_ih + cell.bias_hh, atol=1e-4)


def test_dropout_between_layers_in_training_alone() -> None:
    layer, x = quantized(nn.LSTM(K, WIDTH, num_layers=2, dropout=0.5)), torch.randn(STEPS, SEQUENCES, K)
    assert not torch.equal(layer(x)[0], layer(x)[0])
    layer.dropout = 1.0
    layer.weight_hh_l1 = nn.Parameter(torch.zeros(4 * WIDTH, WIDTH))
    assert torch.equal(layer(x)[0], layer(torch.randn_like(x))[0])  # the last layer sees zeros
    first = layer(x)[1][0][0]  # and the first one its inputs
    layer.eval()
    assert torch.equal(layer(x)[1][0][0], first)
    assert_near(layer(x), exact(layer)(x.double()), ROUNDED)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients(name: str) -> None:
    layer = quantized(LAYERS[name](num_layers=2, bidirectional=True))
    dense = exact(layer)
    x = torch.randn(STEPS, SEQUENCES, K, requires_grad=True)
    z = x.detach().double().requires_grad_()
    biases = [param for param in layer.parameters() if not isinstance(param, QTensor)]
    same = [param for param in dense.parameters() if param.dim() == 1]
    made = torch.autograd.grad(layer(x)[0].sum(), (x, *biases))
    wanted = torch.autograd.grad(dense(z)[0].sum(), (z, *same))
    for one, other in zip(made, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


def test_no_steps_are_an_error() -> None:
    with pytest.raises(ArgumentError, match=r"one step or more; this input has none: \[0, 5, 40\]"):
        quantized(nn.GRU(K, WIDTH))(torch.randn(0, SEQUENCES, K))


def test_arguments_by_name() -> None:
    layer, x = quantized(nn.GRU(K, WIDTH)), torch.randn(STEPS, SEQUENCES, K)
    how = {"has_biases": True, "num_layers": 1, "dropout": 0.0, "train": False, "bidirectional": False}
    given = {"hx": torch.zeros(1, SEQUENCES, WIDTH), "params": layer._flat_weights, **how}
    assert_near(torch.gru(input=x, batch_first=False, **given), layer(x), EXACT)
    rows = {"data": x.flatten(0, 1), "batch_sizes": torch.tensor([SEQUENCES] * STEPS)}
    assert_near(torch.gru(**rows, **given)[1], layer(x)[1], EXACT)


# -- the list of weights that a module keeps beside its parameters ---------------------------------------------------


def runs(layer: nn.RNNBase, x: Tensor) -> None:
    """Its weights are those that it computes with."""
    for name, weight in zip(layer._flat_weights_names, layer._flat_weights, strict=True):
        assert weight is getattr(layer, name)
    assert_near(layer(x), exact(layer)(x.double()), ROUNDED)


def test_weights_that_are_replaced_or_moved_are_those_that_run() -> None:
    layer, x = nn.LSTM(K, WIDTH), torch.randn(STEPS, SEQUENCES, K)
    before = layer(x)[0]
    runs(quantized(layer, "int4-g32"), x)
    assert not torch.allclose(layer(x)[0], before, atol=1e-3)
    runs(copy.deepcopy(layer), x)
    other = quantized(nn.LSTM(K, WIDTH), "int4-g32")
    other.load_state_dict(layer.state_dict())
    runs(other, x)
    assert torch.equal(other(x)[0], layer(x)[0])
    half = copy.deepcopy(layer).to(torch.bfloat16)
    assert half(x.bfloat16())[0].dtype == torch.bfloat16
    assert copy.deepcopy(layer).to("meta")(x.to("meta"))[0].shape == (STEPS, SEQUENCES, WIDTH)
    assert not any(isinstance(each, QTensor) for each in bp.dequantize_(layer)._flat_weights)


def test_weights_are_not_copied_together_for_cudnn() -> None:
    """On a GPU flatten_parameters would ask cuDNN to do so."""
    layer = quantized(nn.LSTM(K, WIDTH))
    assert torch._cudnn_rnn_flatten_weight(layer._flat_weights, 4, K, 2, WIDTH, 0, 1, False, False) is None


# -- traced ----------------------------------------------------------------------------------------------------------


class Between(nn.Module):
    """A recurrent layer between linear ones."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.up, self.layer, self.down = nn.Linear(16, K), LAYERS[name](batch_first=True), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.layer(self.up(x))[0])


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_compiled_models_run_recurrent_layers_as_they_are(name: str) -> None:
    """torch.compile takes no recurrent layer, nor the function that calls one; nothing in it is compiled by itself
    either, which took half a minute for each new number of steps."""
    graphs = []
    for recipe in (None, {"layer": "int8"}):
        model = Between(name).eval()
        if recipe:
            bp.quantize_(model, recipe)
        torch.compiler.reset()
        counters.clear()
        compiled = torch.compile(model, backend="aot_eager")
        for steps in (4, 5, 6):
            x = torch.randn(2, steps, 16)
            assert torch.equal(compiled(x), model(x))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1]


def test_compiled_whole_where_the_user_asks_for_it() -> None:
    model, x = quantized(Between("lstm")).eval(), torch.randn(2, 3, 16)
    torch.compiler.reset()
    with torch._dynamo.config.patch(allow_rnn=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(made, model(x), rtol=0, atol=ROUNDED)


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_exported_step_by_step(name: str) -> None:
    model, x = quantized(Between(name)).eval(), torch.randn(2, 3, 16)
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    called = [str(node.target) for node in program.graph.nodes]
    assert called.count("bitport.linear.default") == 3 + 3  # up, the inputs and down; the state in each step
    x = torch.randn(5, 3, 16)
    torch.testing.assert_close(program.module()(x), model(x), rtol=0, atol=ROUNDED)
