"""Algorithms give the same result in every mode of torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import bitport
from bitport.tensor import QTensor
from tests.turns import turns

RUNS = [
    ("gptq", "int4-g32"),
    ("gptq", "nvfp4"),
    ("signround", "int3-g32"),
    ("awq", "int3-g32"),
    ("smooth", "int8-dyn"),
    ("rotate", "int4-g32"),
    ("rtn", "int8-static"),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


@pytest.fixture(scope="module")
def batches() -> list[Tensor]:
    return [torch.randn(4, 16, 32) * torch.logspace(-1, 1, 32) for _ in range(2)]


def codes(model: nn.Module) -> list[Tensor]:
    return [param.qdata for param in model.parameters() if isinstance(param, QTensor)]


@pytest.fixture
def compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def _compile_blocks(model: nn.Module) -> nn.Module:
    for block in model.children():
        block.compile(backend="eager")
    return model


def _compile_(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


COMPILED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "in place": _compile_,
    "blocks": _compile_blocks,
    "wrapped": lambda model: torch.compile(model, backend="eager"),
}


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("how", "algorithm", "scheme"), turns(COMPILED, RUNS))
def test_a_compiled_model(model: nn.Module, batches: list[Tensor], how: str, algorithm: str, scheme: str) -> None:
    """The model stays compiled."""
    plain, compiled = copy.deepcopy(model), COMPILED[how](copy.deepcopy(model))
    compiled(batches[0])
    for each in (plain, compiled):
        bitport.quantize_(each, scheme, algorithm=algorithm, calibrate=batches, progress=False)
    assert all(map(torch.equal, codes(plain), codes(compiled)))
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch.testing.assert_close(compiled(batches[0]), plain(batches[0]))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before


@pytest.mark.parametrize(("algorithm", "scheme"), RUNS)
def test_inference_mode(model: nn.Module, algorithm: str, scheme: str) -> None:
    """The batches are inference tensors too; the result is used outside inference mode."""
    plain, other = copy.deepcopy(model), copy.deepcopy(model)
    with torch.inference_mode():
        batches = [torch.randn(4, 16, 32)]
        bitport.quantize_(other, scheme, algorithm=algorithm, calibrate=batches, progress=False)
        assert torch.is_inference_mode_enabled()
    bitport.quantize_(plain, scheme, algorithm=algorithm, calibrate=batches, progress=False)
    assert all(map(torch.equal, codes(plain), codes(other)))
    x = torch.randn(4, 32)
    assert torch.equal(plain(x), other(x))


@pytest.mark.parametrize(("algorithm", "scheme"), RUNS)
def test_a_model_made_in_inference_mode(model: nn.Module, batches: list[Tensor], algorithm: str, scheme: str) -> None:
    plain = copy.deepcopy(model)
    with torch.inference_mode():
        other = copy.deepcopy(model)
    assert all(param.is_inference() for param in other.parameters())
    for each in (plain, other):
        bitport.quantize_(each, scheme, algorithm=algorithm, calibrate=batches, progress=False)
    assert all(map(torch.equal, codes(plain), codes(other)))
    x = torch.randn(4, 32)
    with torch.no_grad():
        assert torch.equal(plain(x), other(x))


@pytest.mark.parametrize(("algorithm", "scheme"), RUNS)
def test_autocast_is_for_the_model_alone(batches: list[Tensor], algorithm: str, scheme: str) -> None:
    """The algorithm gets the same results from the same inputs. No input of this block comes from a product."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Sequential(nn.RMSNorm(32), nn.Linear(32, 64)))
    other, product = copy.deepcopy(plain), []
    hook = other[0][1].register_forward_hook(lambda module, args, y: product.append(y.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        told = bitport.quantize_(other, scheme, algorithm=algorithm, calibrate=batches, progress=False)
    hook.remove()
    wanted = bitport.quantize_(plain, scheme, algorithm=algorithm, calibrate=batches, progress=False)
    assert all(map(torch.equal, codes(plain), codes(other)))
    assert [layer.output_sqnr for layer in told.layers] == [layer.output_sqnr for layer in wanted.layers]
    assert torch.bfloat16 in product
