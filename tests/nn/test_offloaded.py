"""Models that accelerate has offloaded are refused: its hooks would bring back the old weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bitport
from bitport import train
from bitport.errors import ArgumentError

accelerate = pytest.importorskip("accelerate", reason="needs the extra: pip install 'bitport[diffusers]'")


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 32)).eval()


FLOATS: dict[str, Callable[[nn.Module], Any]] = {
    "quantize_": lambda model: bitport.quantize_(model, "int4"),
    "gptq": lambda model: bitport.quantize_(model, "int4", algorithm="gptq", calibrate=[torch.ones(2, 96)]),
    "prepare_": lambda model: train.prepare_(model, "int4"),
    "mixed": lambda model: bitport.mixed(model, bits=4, calibrate=[torch.ones(2, 96)]),
}
QUANTIZED: dict[str, Callable[[nn.Module], Any]] = {
    "dequantize_": bitport.dequantize_,
    "learn_scales_": train.learn_scales_,
    "explain": bitport.explain,
}


@pytest.mark.parametrize("verb", [*FLOATS, *QUANTIZED])
def test_an_offloaded_model_is_refused(verb: str) -> None:
    """Otherwise quantize_ would report int4, and the model compute with its floats."""
    model = model_of()
    if verb in QUANTIZED:
        bitport.quantize_(model, "int4")
    accelerate.cpu_offload(model, execution_device="cpu")
    with pytest.raises(ArgumentError, match=r"accelerate has offloaded 0.weight, .*remove_hook_from_submodules"):
        {**FLOATS, **QUANTIZED}[verb](model)


def test_a_model_that_was_offloaded_is_quantized() -> None:
    model, wanted, x = model_of(), model_of(), torch.randn(3, 96)
    bitport.quantize_(wanted, "int4")
    accelerate.cpu_offload(model, execution_device="cpu")
    accelerate.hooks.remove_hook_from_submodules(model)
    bitport.quantize_(model, "int4")
    assert torch.equal(model(x), wanted(x))
    accelerate.cpu_offload(model, execution_device="cpu")
    assert torch.equal(model(x), wanted(x))


def test_a_model_with_hooks_whose_weights_are_there_is_quantized() -> None:
    model, wanted, x = model_of(), model_of(), torch.randn(3, 96)
    bitport.quantize_(wanted, "int4")
    model = accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert hasattr(model, "_hf_hook")
    bitport.quantize_(model, "int4")
    assert torch.equal(model(x), wanted(x))


def test_a_quantized_model_is_saved_and_moved_as_the_errors_say(tmp_path: Path) -> None:
    model, x = model_of(), torch.randn(2, 96)
    bitport.quantize_(model, "int4-g32")
    wanted = model(x)
    with pytest.raises(ArgumentError, match="In accelerate, cpu_offload takes it and disk_offload does not"):
        accelerate.disk_offload(model, tmp_path / "disk", execution_device="cpu")
    with pytest.raises(ArgumentError, match="save_state of accelerate takes it with safe_serialization=False"):
        accelerate.utils.save(model.state_dict(), tmp_path / "state", safe_serialization=True)
    accelerate.utils.save(model.state_dict(), tmp_path / "state", safe_serialization=False)
    accelerate.cpu_offload(model, execution_device="cpu")
    assert torch.equal(model(x), wanted)


def test_an_offloaded_model_is_neither_saved_nor_loaded(tmp_path: Path) -> None:
    """load put the new weights in, and the model computed with those that accelerate had kept."""
    model, x = model_of(), torch.randn(2, 96)
    bitport.quantize_(model, "int4-g32")
    bitport.save(model, tmp_path)
    model[0].bias.data.zero_()
    wanted = model(x)
    accelerate.cpu_offload(model, execution_device="cpu")
    for act in (bitport.load, bitport.save):
        with pytest.raises(ArgumentError, match=r"accelerate has offloaded 0.weight, .*remove_hook_from_submodules"):
            act(model, tmp_path)
    assert torch.equal(model(x), wanted)
    accelerate.hooks.remove_hook_from_submodules(model)
    assert not torch.equal(bitport.load(model, tmp_path)(x), wanted)


class Tied(nn.Module):
    """Of square matrices, so that the one fits where the other belongs."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(64, 64), nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.inner(self.table(ids)))
        return found


def test_weights_beside_a_tied_one_come_back_as_they_were() -> None:
    """accelerate tells by data_ptr() whether a weight is the tied one, which it has brought already: inner was computed
    with the table."""
    torch.manual_seed(0)
    model, ids = Tied().eval(), torch.arange(12).reshape(2, 6)
    bitport.quantize_(model, {"*": "int4-g32"})
    wanted = model(ids)
    model = accelerate.dispatch_model(model, dict.fromkeys(("table", "inner", "head"), "cpu"), force_hooks=True)
    for _ in range(2):
        assert torch.equal(model(ids), wanted)
