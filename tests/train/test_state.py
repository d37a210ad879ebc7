"""state_dict() of models in training with fixed scales: training resumes from it as if it had not stopped."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

import bitport as bp
from bitport.algorithms.solving import uses_data
from bitport.train import convert_, prepare_
from tests.algorithms.test_awq import DATA, Unequal
from tests.train.test_fixed import X, unequal, weights

ALGORITHM = "awq+gptq"


def trained(scheme: str, steps: int = 2) -> nn.Module:
    model = unequal()
    prepare_(model, scheme, algorithm=ALGORITHM, calibrate=DATA)
    go_on(model, steps)
    return model


def go_on(model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(X).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("prepared_again", ["rtn", ALGORITHM, "clip"])
@pytest.mark.parametrize("scheme", ["int4-channel", "nvfp4", "mxfp4-wo", "int8-static"])
def test_training_goes_on_from_a_checkpoint(scheme: str, prepared_again: str) -> None:
    """Whatever scales the loading model had."""
    whole, first = trained(scheme, 4), trained(scheme, 2)
    torch.manual_seed(7)
    other = Unequal()
    data = DATA[:1] if uses_data(prepared_again, scheme) else None
    prepare_(other, scheme, algorithm=prepared_again, calibrate=data)
    other.load_state_dict(through_a_file(first.state_dict()))
    go_on(other, 2)
    y = whole(X)
    assert torch.equal(other(X), y)
    convert_(other)
    assert torch.equal(other(X), y)


def test_entries_of_the_state() -> None:
    floats, model = unequal().state_dict(), trained("int4-channel")
    state = model.state_dict()
    extra = {f"{name}._extra_state" for name in weights(model)}
    assert set(state) == set(floats) | extra
    for name, param in weights(model).items():
        assert type(state[name]) is Tensor
        assert torch.equal(state[name], param.value)
        parts = load(state[f"{name}._extra_state"].numpy().tobytes())
        assert torch.equal(parts["scale"], param.scale)
        assert ("pre_scale" in parts) == (param.pre_scale is not None)
    assert "layers.0.up.weight._extra_state" in model.state_dict(keep_vars=True)
    assert set(load(save({name: tensor.contiguous() for name, tensor in state.items()}))) == set(state)


def test_states_that_do_not_fit() -> None:
    model = trained("int4-channel")
    state = model.state_dict()
    with pytest.raises(RuntimeError, match=r"Unexpected key.*layers\.0\.up\.weight\._extra_state"):
        unequal().load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Missing key.*layers\.0\.up\.weight\._extra_state"):
        copy.deepcopy(model).load_state_dict(unequal().state_dict())
    finer = unequal()
    prepare_(finer, "int4-g32")
    with pytest.raises(RuntimeError, match=r"part 'scale' is .* \[\d+, 1\]; int4-g32 of .* has .* \[\d+, 2\]"):
        finer.load_state_dict(state)
    symmetric = unequal()
    prepare_(symmetric, "int4-channel-sym")
    with pytest.raises(RuntimeError, match="holds zero, which int4-channel-sym does not have"):
        symmetric.load_state_dict(state)


@pytest.mark.parametrize(
    ("damaged", "match"),
    [
        (lambda entry: entry[:-3], "does not hold scales"),
        (lambda entry: entry[:4], "does not hold scales"),
        (lambda entry: "text", "does not hold scales"),
        (lambda entry: as_entry({"zero": torch.zeros(1)}), "part 'scale' is missing"),
        (lambda entry: as_entry({**parts_of(entry), "pre_scale": torch.ones(3)}), r"pre_scale must have shape \[64\]"),
        (lambda entry: as_entry({**parts_of(entry), "scale": torch.ones(5, 1)}), r"part 'scale' is torch.float32 \[5"),
        (lambda entry: as_entry({**parts_of(entry), "act_scale": torch.ones(1, 1)}), "holds an act_scale, unlike"),
        (lambda entry: as_entry({**parts_of(entry), "zeros": torch.ones(5, 1)}), "holds zeros, which"),
    ],
)
def test_damaged_scales(damaged: Any, match: str) -> None:
    model = trained("int4-channel", 0)
    before = model(X)
    state = model.state_dict()
    name = "layers.0.up.weight._extra_state"
    state[name] = damaged(state[name])
    with pytest.raises(RuntimeError, match=match):
        model.load_state_dict(state)
    assert torch.equal(model(X), before)


def parts_of(entry: Tensor) -> dict[str, Tensor]:
    return load(entry.numpy().tobytes())


def as_entry(parts: dict[str, Tensor]) -> Tensor:
    return torch.frombuffer(bytearray(save(parts)), dtype=torch.uint8)


def test_layers_that_are_prepared_one_after_the_other() -> None:
    model, again = unequal(), unequal()
    for each in (model, again):
        prepare_(each, {"re:.*up": "int4-channel", "*": "skip"}, algorithm="gptq", calibrate=DATA)
        prepare_(each, {"re:.*down": "int3-channel", "*": "skip"}, algorithm="clip")
    go_on(model, 1)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(X), model(X))


def test_a_copy_has_hooks_of_its_own() -> None:
    model = trained("int4-channel")
    other, want = copy.deepcopy(model), model(X)
    go_on(other, 1)
    assert torch.equal(model(X), want)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(X), want)
    convert_(other)
    floats = unequal()
    bp.dequantize_(other)
    other.load_state_dict(floats.state_dict(), assign=True)  # no hook is left to object
