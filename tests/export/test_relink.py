"""Programs whose quantized weights are replaced by other modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitport as bp
from bitport.errors import ExportError
from bitport.export import Method
from bitport.export.relink import Operand, relinked
from bitport.numerics import fake_quantize
from bitport.ops.product import linear_then
from bitport.tensor import QTensor, quantize_tensor


class Dense(Operand):
    """The weight as a float matrix, which turns every op into one of torch."""

    made = 0

    def __init__(self, q: QTensor) -> None:
        super().__init__()
        Dense.made += 1
        self.register_buffer("value", q.replace(perm=None, pre_scale=None).dequantize())

    def linear(self, x: Tensor, act: str, act_scale: Tensor | None, bias: Tensor | None) -> Tensor:
        return F.linear(fake_quantize(x, act, act_scale) if act else x, self.value, bias)

    def embedding(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return F.embedding(ids, self.value)


class Every(nn.Module):
    """A tied table, an activation in the op, an input with a permutation and a scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.gate, self.up = nn.Embedding(40, 64), nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        self.special = nn.Linear(64, 64)
        self.head = nn.Linear(64, 40, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return self.head(self.special(linear_then(x, self.gate.weight, self.gate.bias, "silu", self.up(x))))


@pytest.fixture
def every() -> Every:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, order, scale = Every().eval(), torch.randperm(64), torch.rand(64) + 0.5
    bp.quantize_(model, {"table": "int8", "head": "int8", "gate": "int8-dyn", "*": "int4-g32"}, measure=False)
    special = quantize_tensor(model.special.weight.dequantize(), "int4-g32", perm=order, pre_scale=scale)
    model.special.weight = nn.Parameter(special, requires_grad=False)
    return model


def test_the_program_computes_the_same_without_a_quantized_tensor(every: Every) -> None:
    Dense.made = 0
    rows = torch.export.Dim("rows", min=1, max=64)
    program = relinked(Method(every, (torch.arange(5),), ({0: rows},)), lambda q, op: None, Dense, Dense)
    assert Dense.made == 4, "the tied table is one operand"
    assert not [name for name, value in program.state_dict.items() if isinstance(value, QTensor)]
    assert "bitport" not in str(program.graph)
    for ids in (torch.tensor([7]), torch.arange(9) * 3):
        torch.testing.assert_close(program.module()(ids), every(ids), rtol=1e-5, atol=1e-5)


class Named(nn.Module):
    """Layers whose names differ in a dot alone."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.ModuleDict({"up": nn.Linear(64, 64, bias=False)})
        self.gate_up = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate_up(self.gate["up"](x))


def test_layers_with_similar_names_keep_their_own_weights() -> None:
    model = Named().eval()
    for layer in (model.gate["up"], model.gate_up):
        weight = quantize_tensor(layer.weight.detach(), "int4-g32", pre_scale=torch.rand(64) + 0.5)
        layer.weight = nn.Parameter(weight, requires_grad=False)
    x = torch.randn(3, 64)
    program = relinked(Method(model, (x,)), lambda q, op: None, Dense, Dense)
    torch.testing.assert_close(program.module()(x), model(x), rtol=1e-5, atol=1e-5)


def test_a_refusal_names_the_layer_and_its_size(every: Every) -> None:
    def refuses(q: QTensor, op: str) -> str | None:
        return "not today" if op == "dyn_linear_then" else None

    with pytest.raises(ExportError, match=r"^gate\.weight is int8-dyn, 64x64: not today$"):
        relinked(Method(every, (torch.arange(5),)), refuses, Dense, Dense)


def test_weights_of_other_layers_are_refused() -> None:
    model = nn.Sequential(nn.Conv1d(16, 16, 3))
    bp.quantize_(model, {"*": "int8"}, measure=False)
    with pytest.raises(ExportError, match=r"0\.weight is int8.*only linear layers and lookups.*skip"):
        relinked(Method(model, (torch.ones(1, 16, 8),)), lambda q, op: None, Dense, Dense)


def test_experts_are_refused() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(2, 64, 32))

        def forward(self, x: Tensor, ends: Tensor) -> Tensor:
            return F.grouped_mm(x, self.up, offs=ends)

    model = Experts().bfloat16()
    bp.quantize_(model, {"*": "int4-g32"}, measure=False)
    given = (torch.ones(4, 64, dtype=torch.bfloat16), torch.tensor([1, 4], dtype=torch.int32))
    with pytest.raises(ExportError, match=r"^up is int4-g32.*only linear layers and lookups"):
        relinked(Method(model, given), lambda q, op: None, Dense, Dense)


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 64)

    def forward(self, x: Tensor, *states: Tensor) -> list[Tensor]:
        return [self.gate(x), *(F.linear(state[:, :32], self.gate.weight[:, :32]) for state in states)]


ROWS = {0: torch.export.Dim("rows", min=1, max=64)}
SIZES: dict[str, tuple[Any, tuple[int, int, int]]] = {
    "by position": ((ROWS, (ROWS, ROWS)), (5, 5, 5)),
    "by name": ({"states": (ROWS, ROWS), "x": ROWS}, (5, 5, 5)),
    "of one": ((ROWS, (None, None)), (5, 3, 3)),
    "of none": ((), (3, 3, 3)),
}


@pytest.mark.parametrize("sizes", SIZES)
def test_arguments_that_are_collected(sizes: str) -> None:
    """A graph takes them one by one, so the sizes of the module did not fit it: 2 for 3 inputs."""
    model, (shapes, rows) = Stateful().eval(), SIZES[sizes]
    bp.quantize_(model, "int4-g32", measure=False)
    given = tuple(torch.randn(3, 64) for _ in rows)
    program = relinked(Method(model, given, shapes), lambda q, op: None, Dense, Dense)
    given = tuple(torch.randn(each, 64) for each in rows)
    torch.testing.assert_close(program.module()(*given), model(*given), rtol=1e-5, atol=1e-5)
