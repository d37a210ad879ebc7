"""Static input scales: they cover everything that a layer saw."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitport.calibrate.observe import input_scales
from bitport.errors import ArgumentError
from bitport.nn import find_targets


def scales_of(model: nn.Module, activations: dict[str, str], calibrate: Any) -> dict[str, Tensor]:
    """Input scales by module name."""
    chosen = {each: activations[each.module] for each in find_targets(model) if each.module in activations}
    return {name.removesuffix(".weight"): scale for name, scale in input_scales(model, chosen, calibrate).items()}


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
    scales = scales_of(model, {"first": "int8-tensor", "second": "int8-tensor"}, calibrate)
    assert scales["first"].shape == (1, 1)
    assert scales["first"].dtype == torch.float32
    torch.testing.assert_close(scales["first"], torch.tensor([[8.0]]) / 127)
    inner = max(float(model.first(batch).detach().abs().max()) for batch in BATCHES)
    torch.testing.assert_close(scales["second"], torch.tensor([[inner]]) / 127)


def test_an_input_of_zeros_has_a_scale() -> None:
    scale = scales_of(Two(), {"first": "int8-tensor"}, [torch.zeros(1, 4)])["first"]
    assert scale.item() == 1


@pytest.mark.parametrize(("act", "largest"), [("int8-tensor", 127), ("fp8-tensor", 448), ("nvfp4", 448 * 6)])
def test_the_scale_takes_in_the_largest_magnitude(act: str, largest: float) -> None:
    scale = scales_of(Two(), {"first": act}, BATCHES)["first"]
    torch.testing.assert_close(scale, torch.tensor([[8.0 / largest]]))


def test_an_empty_batch_says_nothing() -> None:
    scale = scales_of(Two(), {"first": "int8-tensor"}, [torch.zeros(0, 4), BATCHES[0]])["first"]
    torch.testing.assert_close(scale, torch.tensor([[3.0]]) / 127)


def test_inputs_given_by_keyword_are_seen() -> None:
    class Keyword(Two):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return self.first(input=x)

    assert scales_of(Keyword(), {"first": "int8-tensor"}, BATCHES)["first"].item() == pytest.approx(8 / 127)


def test_a_layer_that_is_never_reached() -> None:
    with pytest.raises(
        ArgumentError, match=r"calibration never reached unused\.weight; give batches that use every layer, or skip"
    ):
        scales_of(Two(), {"first": "int8-tensor", "unused": "int8-tensor"}, BATCHES)
    with pytest.raises(ArgumentError, match="never reached first"):
        scales_of(Two(), {"first": "int8-tensor"}, [])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_inputs(bad: float) -> None:
    with pytest.raises(ArgumentError, match="NaN or infinity at the input of first"):
        scales_of(Two(), {"first": "int8-tensor"}, [BATCHES[0], torch.tensor([[1.0, bad, 0.0, 0.0]])])


@pytest.mark.parametrize("fails", [False, True])
def test_no_hook_is_left_behind(fails: bool) -> None:
    model = Two()
    if fails:
        with pytest.raises(RuntimeError):
            scales_of(model, {"first": "int8-tensor"}, [torch.ones(1, 5)])
    else:
        scales_of(model, {"first": "int8-tensor"}, BATCHES)
    assert not model.first._forward_pre_hooks


def test_nothing_is_recorded_for_autograd_and_the_mode_stays() -> None:
    model = Two().train()
    seen = []
    model.second.register_forward_hook(lambda module, args, y: seen.append(y.requires_grad))
    scales_of(model, {"first": "int8-tensor"}, BATCHES)
    assert seen == [False] * 3
    assert model.training


class Experts(nn.Module):
    """Both products of the experts are in one module, whose input goes into the first."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.rand(2, 6, 4)), nn.Parameter(torch.rand(2, 4, 6))

    def forward(self, x: Tensor) -> Tensor:
        return sum(F.linear(100 * F.linear(x, up), down) for up, down in zip(self.up, self.down, strict=True))  # type: ignore[return-value]


def test_every_weight_of_a_module_has_a_scale_of_its_own() -> None:
    model = Experts()
    scales = input_scales(model, dict.fromkeys(find_targets(model), "int8-tensor"), BATCHES)
    inner = max(float((100 * F.linear(x, up)).abs().max()) for x in BATCHES for up in model.up.detach())
    assert scales["up"].item() == pytest.approx(8 / 127)
    assert scales["down"].item() == pytest.approx(inner / 127)


def test_an_embedding_has_the_scale_of_the_head_that_it_is() -> None:
    """And none if it is no head: token ids are not multiplied."""
    model = nn.Sequential(nn.Embedding(40, 4), nn.Linear(4, 40))
    with torch.no_grad():
        model[0].weight.copy_(torch.linspace(-1, 1, 160).view(40, 4))
    ids = [torch.tensor([[1, 39]])]
    assert set(scales_of(model, {"0": "int8-tensor", "1": "int8-tensor"}, ids)) == {"1"}
    model[1].weight = model[0].weight
    scales = scales_of(model, {"0": "int8-tensor", "1": "int8-tensor"}, ids)
    assert scales["0"].item() == scales["1"].item() == pytest.approx(1 / 127)


def test_the_inputs_are_those_without_dropout() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4)).train()
    assert scales_of(model, {"1": "int8-tensor"}, BATCHES)["1"].item() == pytest.approx(8 / 127)
    assert model.training
    assert model[0].training
