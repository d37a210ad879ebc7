"""Weights that forward() slices or concatenates."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitport as bp
from bitport.errors import ExportError
from bitport.export import Method, decomposed
from bitport.export.compile import graph_of, lowered
from bitport.export.onnx_weight import OnnxWeight, refusal
from bitport.export.ops import FAKES, overload
from bitport.export.relink import relinked
from bitport.export.trace import exported
from bitport.tensor import QTensor
from bitport.tensor.exporting import INNER
from tests.versions import since

K, N = 128, 96
ROWS = torch.export.Dim("rows", min=2, max=8)
SCHEMES = ("int4-g32", "int8-dyn", "mxfp4-wo")


class Pieces(nn.Module):
    def __init__(self, scheme: str) -> None:
        super().__init__()
        self.whole, self.other = nn.Linear(K, N), nn.Linear(K, N)
        bp.quantize_(self.bfloat16().eval(), scheme, measure=False, progress=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        weight, bias = self.whole.weight, self.whole.bias
        first, _, third = weight.chunk(3)
        return {
            "rows": F.linear(x, weight[32:80], bias[32:80]),
            "columns": F.linear(x[:, 64:], weight[:, 64:]),
            "chunks": F.linear(x, first) * F.linear(x, third),
            "joined": F.linear(x, torch.cat([weight, self.other.weight])),
            "piece of a piece": F.linear(x, torch.cat([weight, self.other.weight])[48:144]),
            "turned": x @ self.other.weight[:48].t(),
        }


class Lookups(nn.Module):
    """Two of these weights begin where the whole table does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(N, K).bfloat16()
        bp.quantize_(self, {"table": "int4-g32"}, measure=False, progress=False)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        weight = self.table.weight
        return {
            "whole": F.embedding(ids, weight),
            "first rows": F.embedding(ids, weight[:64]),
            "other rows": F.embedding(ids, weight[32:]),
            "first columns": F.embedding(ids, weight[:, :64]),
        }


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, K, N) / K**0.5)

    def forward(self, x: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.experts[1], x.expand(2, -1, -1) @ self.experts[picked]


def experts() -> nn.Module:
    model = nn.Sequential(Experts())
    bp.quantize_(model, "int4-g32", measure=False, progress=False)
    return model[0].eval()


def method(scheme: str) -> Method:
    return Method(Pieces(scheme), (torch.randn(3, K).bfloat16(),), ({0: ROWS},))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_torch_exports_them(scheme: str) -> None:
    """Without bitport's own export code."""
    given = method(scheme)
    program = torch.export.export(given.module, given.args, dynamic_shapes=given.dynamic_shapes, strict=False)
    x = torch.randn(5, K).bfloat16()
    for name, y in given.module(x).items():
        assert torch.equal(program.module()(x)[name], y), name


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_program_makes_them_once(scheme: str) -> None:
    """The native products get constants, in the layout that they read."""
    given = method(scheme)
    graph = graph_of(lowered(exported(given)))
    calls = [node for node in graph.graph.nodes if node.target in {overload(name) for name in FAKES}]
    assert len(calls) == len(given.module(given.args[0])) + 1
    for node in calls:
        weights = [each for each in node.args[1:5] if each is not None]
        assert [each.op for each in weights] == ["get_attr"] * len(weights)
    made = [node.args[0] for node in exported(given).graph.find_nodes(op="call_function", target=INNER)]
    assert {node.op for node in made} == {"placeholder"}


def test_they_are_spelled_out() -> None:
    given = method("int4-g32")
    program = decomposed(given.module, given.args, given.dynamic_shapes)
    x = torch.randn(2, K).bfloat16()
    for name, y in given.module(x).items():
        torch.testing.assert_close(program.module()(x)[name], y, rtol=2**-6, atol=2**-6, msg=name)


def test_other_runtimes_get_them_as_weights() -> None:
    """With their existing codes: for rows 32 to 80, those rows."""
    given = Method(Pieces("int4-g32").float(), (torch.randn(3, K),), ({0: ROWS},))
    program = relinked(given, refusal, OnnxWeight, OnnxWeight)
    whole = given.module.whole.weight.plain().data
    held = [each for name, each in program.state_dict.items() if name.endswith("codes")]
    assert any(torch.equal(each.flatten(1), whole[32:80]) for each in held)
    assert not any(isinstance(each, QTensor) for each in program.state_dict.values())


def test_an_expert_and_those_that_an_input_picks() -> None:
    module = experts()
    args = torch.randn(3, K), torch.tensor([2, 0])
    program = lowered(exported(Method(module, args, ({0: ROWS}, None))))
    x, picked = torch.randn(4, K), torch.tensor([1, 1])
    for one, other in zip(program.module()(x, picked), module(x, picked), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


class One(nn.Module):
    def __init__(self, scheme: str, reads: bool) -> None:
        super().__init__()
        self.experts, self.reads = nn.Parameter(torch.randn(3, N, K) / K**0.5), reads
        bp.quantize_(nn.Sequential(self), scheme, measure=False, progress=False)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        return F.linear(x, self.experts[at.item() if self.reads else at])


@pytest.mark.parametrize(
    "reads", [pytest.param(False, id="a tensor", marks=since("2.13")), pytest.param(True, id="a number")]
)
@pytest.mark.parametrize("scheme", ["int4-g32", "int8-dyn", "fp8-row", "mxfp4-wo", "nvfp4"])
def test_an_expert_that_an_input_picks_by_its_number(scheme: str, reads: bool) -> None:
    """torch.export refused the offsets of its parts: "Operator getattr is not an allowed operator type"."""
    module, given = One(scheme, reads), (torch.randn(3, K), torch.tensor(1))
    program = exported(Method(module.eval(), given, ({0: ROWS}, None)))
    graph_of(lowered(program))
    runs = program.module(), decomposed(module, given, ({0: ROWS}, None)).module()
    for at in (0, 2, -1):
        x = torch.randn(4, K)
        for run in runs:
            torch.testing.assert_close(run(x, torch.tensor(at)), module(x, torch.tensor(at)), rtol=1e-5, atol=1e-5)


def test_other_runtimes_pick_none() -> None:
    class Picked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = experts().experts

        def forward(self, x: Tensor, picked: Tensor) -> Tensor:
            return x.expand(2, -1, -1) @ self.experts[picked]

    with pytest.raises(ExportError, match=r"picked by an input.*compute with all"):
        relinked(Method(Picked(), (torch.randn(3, K), torch.tensor([2, 0]))), refusal, OnnxWeight, OnnxWeight)
