"""Exported programs without bitport's ops."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._functorch._aot_autograd.subclass_parametrization import unwrap_tensor_subclass_parameters
from torch._ops import OpOverload

import bitport as bp
from bitport.errors import ExportError
from bitport.export import Method, decomposed
from bitport.export.compile import graph_of, lowered
from bitport.export.trace import exported


@pytest.mark.parametrize("scheme", ["int4-g32", "int8-dyn", "mxfp4", "nf4"])
def test_it_holds_no_op_of_bitport(scheme: str) -> None:
    model = nn.Sequential(nn.Embedding(16, 64), nn.Linear(64, 32), nn.ReLU()).eval()
    bp.quantize_(model, {"0": "int8", "*": scheme}, measure=False)
    layout = model[1].weight.bits_layout
    rows = torch.export.Dim("rows", min=2, max=8)
    program = decomposed(model, (torch.arange(3),), ({0: rows},))
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not [name for name in called if "bitport" in name]
    ids = torch.tensor([3, 1, 15, 0])
    torch.testing.assert_close(program.module()(ids), model(ids), rtol=1e-5, atol=1e-5)
    assert model[1].weight.bits_layout == layout


@pytest.mark.parametrize("scheme", ["int2", "int3", "int4", "int5", "int8", "int8-dyn", "int4-int8", "nf4"])
def test_core_ops(scheme: str) -> None:
    """They had shifts of integers, with which neither ExecuTorch nor ONNX Runtime took them."""
    model, x = nn.Sequential(nn.Linear(72, 32)).eval(), torch.randn(3, 72)
    bp.quantize_(model, scheme, measure=False)
    program = decomposed(model, (x,), ({0: torch.export.Dim("rows", min=1, max=8)},))
    called = {node.target for node in program.graph.nodes if node.op == "call_function"}
    assert {each for each in called if isinstance(each, OpOverload) and torch.Tag.core not in each.tags} == set()
    torch.testing.assert_close(program.module()(x), model(x), rtol=1e-5, atol=1e-5)


DROPS: dict[str, nn.Module] = {
    "a module": nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1)),
    "channels": nn.Sequential(nn.Linear(64, 64), nn.Dropout1d(0.1)),
    "attention": nn.TransformerEncoderLayer(64, 4, 64, dropout=0.1, batch_first=True),
}


@pytest.mark.parametrize("what", DROPS)
def test_a_model_in_training_does_not_drop_by_chance(what: str) -> None:
    model, x = DROPS[what], torch.randn(2, 3, 64)
    with pytest.raises(ExportError, match=r"call its eval\(\) first"):
        decomposed(model.train(), (x,))
    assert torch.allclose(decomposed(model.eval(), (x,)).module()(x), model(x), atol=1e-5)


def test_dropout_of_nothing_is_none() -> None:
    model, x = nn.TransformerEncoderLayer(64, 4, 64, dropout=0.0, batch_first=True).train(), torch.randn(2, 3, 64)
    assert torch.allclose(decomposed(model, (x,)).module()(x), model(x), atol=1e-5)


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x - 1


def test_what_torch_cannot_trace_is_told_in_our_words_and_its_own() -> None:
    with pytest.raises(ExportError, match=r"cannot trace Branches with.*data-dependent(?s:.*)numbers in tensors"):
        decomposed(Branches(), (torch.ones(3),))


class Positive(nn.Module):
    """As experts take the rows that are theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(16, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = x.amax(-1).gt(0).nonzero().flatten()
        return self.layer(x[ids] + self.table(ids))


@pytest.mark.parametrize("scheme", ["int4-g32", "int8-dyn", "fp8-block", "mxfp4", "nvfp4"])
def test_rows_whose_number_depends_on_the_numbers_in_tensors(scheme: str) -> None:
    model = Positive().eval()
    bp.quantize_(model, {"table": "int8", "layer": scheme}, measure=False)
    program = decomposed(model, (torch.randn(16, 64),))
    for count in (0, 1, 5, 16):
        x = torch.randn(16, 64).abs()
        x[count:] *= -1
        torch.testing.assert_close(program.module()(x), model(x), rtol=1e-5, atol=1e-5)
        assert len(model(x)) == count


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: self.layer(x), lambda x: x * 2, (x,))


@pytest.fixture
def chosen() -> nn.Module:
    model = Chosen().eval()
    bp.quantize_(model, {"*": "int4-g32"}, measure=False)
    return unwrap_tensor_subclass_parameters(model)


def test_a_branch(chosen: nn.Module) -> None:
    program = decomposed(chosen, (torch.ones(3, 64),)).module()
    for x in (torch.ones(3, 64), -torch.ones(3, 64)):
        torch.testing.assert_close(program(x), chosen(x), rtol=1e-5, atol=1e-5)


def test_a_branch_of_a_package(chosen: nn.Module) -> None:
    """It would need this library when it runs, since the table of its number type would be made there."""
    with pytest.raises(ExportError, match=r"branch or a loop .* with a quantized weight.*a rule that says skip"):
        graph_of(lowered(exported(Method(chosen, (torch.ones(3, 64),)))))
