"""Static input scales: what takes in everything a layer saw."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitport.calibrate.observe import input_scales
from bitport.errors import ArgumentError


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        return self.second(self.first(x) + shift)


BATCHES = [torch.tensor([[1.0, -2.0, 3.0, 0.5]]), torch.tensor([[0.0, -8.0, 1.0, 2.0]]), torch.ones(2, 4)]


@pytest.mark.parametrize(
    "calibrate",
    [
        pytest.param(BATCHES, id="tensors"),
        pytest.param([(batch,) for batch in BATCHES], id="tuples"),
        pytest.param([{"x": batch} for batch in BATCHES], id="keywords"),
        pytest.param((batch for batch in BATCHES), id="generator"),
        pytest.param(lambda model: [model(batch) for batch in BATCHES], id="function"),
    ],
)
def test_the_largest_magnitude_of_all_batches(calibrate: Any) -> None:
    model = Two()
    scales = input_scales(model, {"first": "int8-tensor", "second": "int8-tensor"}, calibrate)
    assert scales["first"].shape == (1, 1)
    assert scales["first"].dtype == torch.float32
    torch.testing.assert_close(scales["first"], torch.tensor([[8.0]]) / 127)
    inner = max(float(model.first(batch).detach().abs().max()) for batch in BATCHES)
    torch.testing.assert_close(scales["second"], torch.tensor([[inner]]) / 127)


def test_an_input_of_zeros_has_a_scale() -> None:
    scale = input_scales(Two(), {"first": "int8-tensor"}, [torch.zeros(1, 4)])["first"]
    assert scale.item() == 1


@pytest.mark.parametrize(("act", "largest"), [("int8-tensor", 127), ("fp8-tensor", 448), ("nvfp4", 448 * 6)])
def test_the_scale_takes_in_the_largest_magnitude(act: str, largest: float) -> None:
    scale = input_scales(Two(), {"first": act}, BATCHES)["first"]
    torch.testing.assert_close(scale, torch.tensor([[8.0 / largest]]))


def test_an_empty_batch_says_nothing() -> None:
    scale = input_scales(Two(), {"first": "int8-tensor"}, [torch.zeros(0, 4), BATCHES[0]])["first"]
    torch.testing.assert_close(scale, torch.tensor([[3.0]]) / 127)


def test_inputs_given_by_keyword_are_seen() -> None:
    class Keyword(Two):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return self.first(input=x)

    assert input_scales(Keyword(), {"first": "int8-tensor"}, BATCHES)["first"].item() == pytest.approx(8 / 127)


def test_a_layer_that_is_never_reached() -> None:
    with pytest.raises(
        ArgumentError, match="calibration never reached unused; give batches that use every layer, or skip them"
    ):
        input_scales(Two(), {"first": "int8-tensor", "unused": "int8-tensor"}, BATCHES)
    with pytest.raises(ArgumentError, match="never reached first"):
        input_scales(Two(), {"first": "int8-tensor"}, [])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_inputs(bad: float) -> None:
    with pytest.raises(ArgumentError, match="NaN or infinity at the input of first"):
        input_scales(Two(), {"first": "int8-tensor"}, [BATCHES[0], torch.tensor([[1.0, bad, 0.0, 0.0]])])


@pytest.mark.parametrize("fails", [False, True])
def test_no_hook_is_left_behind(fails: bool) -> None:
    model = Two()
    if fails:
        with pytest.raises(RuntimeError):
            input_scales(model, {"first": "int8-tensor"}, [torch.ones(1, 5)])
    else:
        input_scales(model, {"first": "int8-tensor"}, BATCHES)
    assert not model.first._forward_pre_hooks


def test_nothing_is_recorded_for_autograd_and_the_mode_stays() -> None:
    model = Two().train()
    seen = []
    model.second.register_forward_hook(lambda module, args, y: seen.append(y.requires_grad))
    input_scales(model, {"first": "int8-tensor"}, BATCHES)
    assert seen == [False] * 3
    assert model.training
