"""explain(): the op of every quantized weight, and for each number of rows the kernel and the reasons against
others."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import bitport
from bitport.layouts import LAYOUTS, Matrix, register_layout
from bitport.layouts.plain import Plain
from bitport.numerics import Quantized
from bitport.ops import IMPLS, Impl, decide, register_kernel
from bitport.ops.product import operand
from bitport.tensor import quantize_tensor
from bitport.train import learn_scales_


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.act = nn.Linear(64, 32)
        self.conv = nn.Conv1d(64, 8, 3)
        self.experts = nn.Parameter(torch.randn(3, 16, 64))
        self.dyn_experts = nn.Parameter(torch.randn(3, 16, 64))
        self.rest = nn.Linear(64, 4)


RULES = [
    ("rest", "skip"),
    ("embed", "int8"),
    ("act", "int8-dyn"),
    ("conv", "int4-g32"),
    ("dyn_experts", "fp8-row"),
    ("*", "int4-g32"),
]
OPS_OF = {
    "embed.weight": "embedding",
    "layers.0.weight": "linear",
    "layers.1.weight": "linear",
    "layers.2.weight": "linear",
    "act.weight": "dyn_linear",
    "conv.weight": "dequantize",
    "experts": "grouped_linear",
    "dyn_experts": "dyn_grouped_linear",
}


@pytest.fixture
def model() -> nn.Module:
    made = Model()
    bitport.quantize_(made, RULES)
    return made


def test_every_quantized_weight_with_its_op(model: nn.Module) -> None:
    explanation = bitport.explain(model, rows=[1, 7])
    assert explanation.rows == (1, 7)
    assert {layer.name: layer.op for layer in explanation.layers} == OPS_OF
    for layer in explanation.layers:
        assert set(layer.decisions) == {1, 7}
        assert layer.device == "cpu"
        assert layer.layout


def test_it_names_the_kernel_that_runs(model: nn.Module) -> None:
    weight = model.layers[0].weight
    explained = {layer.name: layer for layer in bitport.explain(model, rows=(7,)).layers}["layers.0.weight"]
    assert explained.decisions[7] == decide("linear", torch.randn(7, 64), *operand(weight), None)


@pytest.mark.usefixtures("own_tables")
def test_refusals_per_number_of_rows(model: nn.Module) -> None:
    def few(x: torch.Tensor, *rest: Any) -> str | None:
        return None if x.shape[0] <= 4 else f"at most 4 rows, not {x.shape[0]}"

    register_kernel(Impl("linear", "few", "cpu", lambda x, *rest: x, few, 1_000_000))
    explanation = bitport.explain(model, rows=(1, 64))
    layer = next(layer for layer in explanation.layers if layer.name == "layers.1.weight")
    assert layer.decisions[1].kernel == "few"
    assert ("few", "at most 4 rows, not 64") in layer.decisions[64].refused
    assert "few refused: at most 4 rows, not 64" in str(explanation)


@pytest.mark.usefixtures("own_tables")
def test_the_layout_that_a_kernel_needs_says_why_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel only knows that the weight is plain."""

    class Tiles(Plain):
        name, devices = "tiles", ("cpu",)

        def refuses(self, matrix: Matrix, parts: Quantized) -> str | None:
            return f"N must be a multiple of 64, not {matrix.n}" if matrix.n % 64 else None

    def supports(x: torch.Tensor, *rest: Any) -> str | None:
        return None if rest[9] == "tiles" else f"the weight must be in layout tiles, not {rest[9]}"

    for other in LAYOUTS.values():
        monkeypatch.setattr(other, "devices", ())
    register_layout(Tiles())
    for op in ("linear", "dyn_linear", "embedding"):
        IMPLS.setdefault((op, "cpu"), []).clear()
    for op in ("linear", "dyn_linear"):
        register_kernel(Impl(op, "of_tiles", "cpu", lambda x, *rest: x, supports))
    model = Model()
    bitport.quantize_(model, RULES)
    explanation = bitport.explain(model, rows=1)
    layers = {layer.name: layer for layer in explanation.layers}
    held, plain, without_kernels = (layers[name] for name in ("layers.0.weight", "act.weight", "embed.weight"))
    assert (held.layout, held.decisions[1].kernel, held.layouts) == ("tiles", "of_tiles", ())
    assert plain.layouts == (("tiles", "N must be a multiple of 64, not 32"),)
    assert "act.weight: layout tiles refused: N must be a multiple of 64, not 32" in str(explanation)
    assert (without_kernels.layout, without_kernels.layouts) == ("plain", ())


def test_text_groups_layers_that_are_alike(model: nn.Module) -> None:
    text = str(bitport.explain(model, rows=(1,)))
    assert "layers.0.weight .. layers.2.weight (3)" in text
    assert text.splitlines()[0].split() == ["weights", "scheme", "layout", "device", "op", "1", "rows"]
    assert "conv.weight: dequantized on every call; PyTorch computes the convolution" in text


def test_json(model: nn.Module) -> None:
    explanation = bitport.explain(model, rows=(1, 7))
    data = json.loads(explanation.to_json())
    assert [layer["name"] for layer in data["layers"]] == [layer.name for layer in explanation.layers]
    assert set(data["layers"][0]["decisions"]) == {"1", "7"}


def test_a_float_model() -> None:
    assert str(bitport.explain(nn.Linear(4, 4))) == "no quantized weight in this model"


def test_a_model_without_data(model: nn.Module) -> None:
    assert len(bitport.explain(model.to("meta")).layers) == len(OPS_OF)


def test_experts_with_a_fixed_scale() -> None:
    made = nn.Module()
    made.experts = nn.Parameter(
        quantize_tensor(torch.randn(3, 16, 64), "fp8-static", act_scale=torch.ones(1, 1)), False
    )
    (layer,) = bitport.explain(made, rows=(7,)).layers
    assert layer.op == "grouped_linear"
    ends = torch.tensor([1, 2, 7], dtype=torch.int32)
    assert layer.decisions[7] == decide("grouped_linear", torch.randn(7, 64), ends, *operand(made.experts))


def test_nothing_is_computed(model: nn.Module) -> None:
    """The rows exist only as a number."""
    assert bitport.explain(model, rows=(1 << 30,)).layers


class Adapted(nn.Linear):
    def __init__(self) -> None:
        super().__init__(64, 64)
        self.more = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight + self.more, self.bias)


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Renamed(nn.Linear):
    pass


def test_a_forward_that_is_not_known_is_told() -> None:
    """It may compute with the weight before it multiplies, which no kernel does: explain said nothing, and named the
    kernel of F.linear."""
    made = nn.Sequential(Adapted(), Scaled(64, 64), Renamed(64, 64), nn.MultiheadAttention(64, 4))
    report = bitport.quantize_(made, "int4-g32")
    note = "Adapted has its own forward, which may use the weight otherwise than Linear"
    assert [layer.name for layer in report.quantized if note in layer.reason] == ["0.weight"]
    explanation = bitport.explain(made, rows=1)
    assert [layer.note for layer in explanation.layers] == [note, *[""] * 4]
    assert f"\n0.weight: {note}" in str(explanation)


class Ops(TorchDispatchMode):
    """The products that run, and the layout of their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "bitport":
            layouts = [each for each in args if isinstance(each, str) and each in LAYOUTS]
            self.seen += [(func._opname, each) for each in layouts]
        return func(*args, **(kwargs or {}))


def test_a_model_whose_scales_are_learned_is_explained_as_it_computes() -> None:
    """Its layers multiply in the layout of the device; the plain weights that it keeps beside are in no product."""
    made = nn.Sequential(nn.Embedding(16, 64), nn.Linear(64, 64), nn.Linear(64, 16, bias=False))
    made[2].weight = made[0].weight
    bitport.quantize_(made, {"*": "int4-g32"})
    before = bitport.explain(made)
    learn_scales_(made)
    explanation = bitport.explain(made)
    assert explanation == before
    assert [layer.name for layer in explanation.layers] == ["0.weight", "1.weight"]
    with Ops() as ops:
        made(torch.tensor([1, 2, 3]))
    assert set(ops.seen) == {(explanation.layers[1].op, explanation.layers[1].layout)}
