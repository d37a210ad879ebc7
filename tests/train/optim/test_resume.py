"""A run resumes from a saved state as if it had not stopped, and rejects any state that is not its own."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitport.errors import ArgumentError
from bitport.tensor import QTensor
from bitport.train.optim import SGD, STATES, Adam, AdamW, LowBitOptimizer

from .judges import OPTIONS

SHAPES = ((20, 300), (8, 3, 16, 16), (333, 21), (5000,), (7,))


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]


def train(optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(100 + step)
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.randn(param.shape).to(param.dtype)
        optimizer.step()


def saved(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Save to a file and load it with only what torch.load allows."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def bits(tensor: Tensor) -> list[Tensor]:
    parts = [tensor.qdata, tensor.scale] if isinstance(tensor, QTensor) else [tensor]
    return [part.detach().reshape(-1).contiguous().view(torch.uint8) for part in parts]


def assert_same(mine: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    for group, other in zip(mine.param_groups, theirs.param_groups, strict=True):
        for param, twin in zip(group["params"], other["params"], strict=True):
            assert torch.equal(param, twin)
            assert mine.state[param].keys() == theirs.state[twin].keys()
            for name, value in mine.state[param].items():
                for part, same in zip(bits(value), bits(theirs.state[twin][name]), strict=True):
                    assert torch.equal(part, same)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("name", ["adamw", "lion", "sgd-momentum"])
def test_it_goes_on_bit_for_bit(name: str, states: str, dtype: torch.dtype) -> None:
    cls, options = OPTIONS[name]
    whole = cls(parameters(dtype), states=states, **options)
    train(whole, range(6))
    begun = cls(parameters(dtype), states=states, **options)
    train(begun, range(3))
    kept = [param.detach().clone() for param in begun.param_groups[0]["params"]]
    resumed = cls([nn.Parameter(param) for param in kept], **options | {"lr": 0.5})
    resumed.load_state_dict(saved(begun))
    assert resumed.param_groups[0]["states"] == states
    train(resumed, range(3, 6))
    assert_same(resumed, whole)


@pytest.mark.parametrize("states", ["8bit", "fp8", "float32"])
def test_copies_do_not_share(states: str) -> None:
    """deepcopy, pickling the whole with torch.save, and loading one dict twice: the copies are independent."""
    first = AdamW(parameters(torch.bfloat16), states=states)
    train(first, range(2))
    twin = copy.deepcopy(first)
    loaded = AdamW(parameters(torch.bfloat16))
    state = first.state_dict()
    loaded.load_state_dict(state)
    before = copy.deepcopy(state)
    train(twin, range(2, 4))
    train(loaded, range(2, 4))
    for number, kept in before["state"].items():
        for name, value in kept.items():
            assert all(map(torch.equal, bits(value), bits(state["state"][number][name])))
    train(first, range(2, 4))
    assert_same(first, twin)


def test_a_state_moved_to_another_layout_is_brought_back() -> None:
    """A state assigned by hand may be in a layout for products."""
    one, other = (AdamW(parameters(), states="fp8") for _ in range(2))
    for optimizer in (one, other):
        train(optimizer, range(2))
    for state in other.state.values():
        for name, value in state.items():
            if isinstance(value, QTensor):
                state[name] = value.to_layout("cpu_tiles")
    for optimizer in (one, other):
        train(optimizer, range(2, 4))
    assert_same(one, other)


def test_float_states_of_small_tensors_are_not_cast() -> None:
    """torch casts them to the parameter's dtype, which would change them."""
    begun, resumed = AdamW(parameters(torch.bfloat16)), AdamW(parameters(torch.bfloat16))
    train(begun, range(2))
    resumed.load_state_dict(begun.state_dict())
    before, after = (o.state[o.param_groups[0]["params"][-1]]["exp_avg"] for o in (begun, resumed))
    assert after.dtype == torch.float32
    assert torch.equal(before, after)


def test_seeds_and_steps_draw_other_bits() -> None:
    ends = []
    for seed in (0, 0, 1):
        optimizer = AdamW(parameters(torch.bfloat16), seed=seed)
        train(optimizer, range(2))
        ends.append(torch.cat([param.detach().flatten() for param in optimizer.param_groups[0]["params"]]))
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_global_random_state_is_not_touched() -> None:
    optimizer = AdamW(parameters(torch.bfloat16))
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    before = torch.get_rng_state()
    optimizer.step()
    assert torch.equal(torch.get_rng_state(), before)


def test_hooks_on_loading_are_heard() -> None:
    begun, resumed = AdamW(parameters()), AdamW(parameters())
    train(begun, range(2))

    def double(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = {number: {**kept, "step": kept["step"] * 10} for number, kept in state_dict["state"].items()}
        return {**state_dict, "state": state}

    resumed.register_load_state_dict_pre_hook(double)
    resumed.load_state_dict(begun.state_dict())
    assert {float(state["step"]) for state in resumed.state.values()} == {20.0}


@pytest.mark.parametrize("states", ["8bit", "float32"])
def test_a_state_of_torch_comes_in(states: str) -> None:
    """Its moments are rounded to the requested format, and the next step is close to torch's."""
    theirs = torch.optim.AdamW(parameters(), lr=1e-2)
    train(theirs, range(3))
    mine = AdamW([nn.Parameter(p.detach().clone()) for p in theirs.param_groups[0]["params"]], states=states)
    mine.load_state_dict(theirs.state_dict())
    assert mine.param_groups[0]["lr"] == 1e-2
    assert isinstance(mine.state[mine.param_groups[0]["params"][0]]["exp_avg"], QTensor) == (states == "8bit")
    for optimizer in (theirs, mine):
        train(optimizer, range(3, 4))
    for param, twin in zip(mine.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
        assert (param - twin).abs().max() <= (0.2 if states == "8bit" else 1e-4) * 1e-2


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_state_of_torch_without_steps_comes_in(momentum: float) -> None:
    """SGD does not count steps there; its next gradient is not the first, to which dampening does not apply."""
    options = {"lr": 1e-2, "momentum": momentum, "dampening": 0.5}
    theirs = torch.optim.SGD(parameters(), **options)
    train(theirs, range(2))
    mine = SGD([nn.Parameter(p.detach().clone()) for p in theirs.param_groups[0]["params"]], states="float32")
    mine.load_state_dict(theirs.state_dict())
    for optimizer in (theirs, mine):
        train(optimizer, range(2, 4))
    for param, twin in zip(mine.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(param, twin)


def test_momentum_that_is_off_for_a_while_goes_on() -> None:
    whole = SGD(parameters(), momentum=0.9)
    train(whole, range(2))
    whole.param_groups[0]["momentum"] = 0.0
    train(whole, range(2, 3))
    resumed = SGD([nn.Parameter(param.detach().clone()) for param in whole.param_groups[0]["params"]])
    resumed.load_state_dict(saved(whole))
    for optimizer in (whole, resumed):
        optimizer.param_groups[0]["momentum"] = 0.9
        train(optimizer, range(3, 5))
    assert_same(resumed, whole)


def test_a_state_of_torch_leaves_options_that_it_does_not_know() -> None:
    first, *rest = parameters()
    theirs = torch.optim.AdamW([{"params": [first]}, {"params": rest}], lr=0.5)
    train(theirs, range(1))
    mine = AdamW([{"params": [first], "states": "4bit", "seed": 7}, {"params": rest}], states="fp8")
    mine.load_state_dict(theirs.state_dict())
    assert [(group["states"], group["seed"], group["lr"]) for group in mine.param_groups] == [
        ("4bit", 7, 0.5),
        ("fp8", 0, 0.5),
    ]
    kept = mine.state[first]["exp_avg"]
    assert isinstance(kept, QTensor)
    assert kept.scheme.weight.dtype == "dynamic4"


def test_weight_decay_of_another_kind_does_not_come_in() -> None:
    theirs = torch.optim.AdamW(parameters())
    train(theirs, range(1))
    with pytest.raises(ArgumentError, match="decoupled_weight_decay=True: that is AdamW, and this is Adam"):
        Adam(parameters()).load_state_dict(theirs.state_dict())


def hostile(changes: dict[str, Any]) -> tuple[LowBitOptimizer, dict[str, Any]]:
    optimizer = AdamW(parameters())
    train(optimizer, range(1))
    state = optimizer.state_dict()
    state["state"][0] = {name: value for name, value in (state["state"][0] | changes).items() if value is not ...}
    return optimizer, state


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"exp_avg": torch.ones(20, 299)},
        r"exp_avg of parameter 0 is torch.float32 \[20, 299\]; it must be a float tensor",
    ),
    ({"exp_avg": torch.ones(20, 300, dtype=torch.uint8)}, r"exp_avg of parameter 0 is torch.uint8 \[20, 300\]"),
    ({"exp_avg": [1.0, 2.0]}, "exp_avg of parameter 0 is list; it must be a float tensor"),
    ({"exp_avg": ...}, r"the state of parameter 0 has \['exp_avg_sq', 'step'\]; AdamW has step, exp_avg, exp_avg_sq"),
    ({"more": torch.ones(1)}, r"the state of parameter 0 has \['exp_avg', 'exp_avg_sq', 'more', 'step'\]"),
    ({"step": torch.tensor(-1.0)}, "it must be one whole number, 0 or more"),
    ({"step": torch.tensor(float("nan"))}, "it must be one whole number, 0 or more"),
    ({"step": torch.tensor(float("inf"))}, "it must be one whole number, 0 or more"),
    ({"step": 1.5}, "it must be one whole number, 0 or more"),
    ({"step": torch.ones(2)}, "it must be one whole number, 0 or more"),
    ({"step": "many"}, "it must be one whole number, 0 or more"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[str(at) for at in range(len(WRONG))])
def test_a_state_that_is_none_is_refused_and_nothing_changes(changes: dict[str, Any], message: str) -> None:
    optimizer, state = hostile(changes)
    before = copy.deepcopy(optimizer)
    state["param_groups"][0]["lr"] = 123.0
    with pytest.raises(ArgumentError, match=message):
        optimizer.load_state_dict(state)
    assert_same(optimizer, before)
    assert optimizer.param_groups[0]["lr"] == 1e-3


def test_the_state_of_another_parameter_is_refused() -> None:
    optimizer, state = hostile({})
    state["state"][0]["exp_avg_sq"] = state["state"][0]["exp_avg"]
    with pytest.raises(ArgumentError, match=r"exp_avg_sq of parameter 0 is QTensor.*dynamic8.*wants custom.udynamic8"):
        optimizer.load_state_dict(state)
    optimizer, state = hostile({})
    state["state"][0]["exp_avg"] = state["state"][1]["exp_avg"]
    with pytest.raises(ArgumentError, match=r"shape=\(8, 3, 16, 16\).*this tensor of shape \[20, 300\] wants"):
        optimizer.load_state_dict(state)
    optimizer, state = hostile({})
    state["state"][4]["exp_avg"] = state["state"][1]["exp_avg"]
    with pytest.raises(ArgumentError, match=r"wants torch.float32 of shape \[7\]"):
        optimizer.load_state_dict(state)


def test_options_that_are_loaded_are_checked() -> None:
    optimizer, state = hostile({})
    for changes, message in (({"states": "3bit"}, "unknown states='3bit'"), ({"amsgrad": True}, "amsgrad=True")):
        state["param_groups"][0] |= changes
        with pytest.raises(ArgumentError, match=message):
            optimizer.load_state_dict(state)
        state = optimizer.state_dict()


def test_other_groups_are_refused() -> None:
    with pytest.raises(ValueError, match=r"different number of parameter groups|doesn't match the size"):
        AdamW(parameters()[:2]).load_state_dict(AdamW(parameters()).state_dict())


def test_momentum_that_was_not_kept() -> None:
    plain, heavy = SGD(parameters()), SGD(parameters(), momentum=0.9)
    train(plain, range(1))
    state = plain.state_dict()
    state["param_groups"][0]["momentum"] = 0.9
    with pytest.raises(ArgumentError, match="SGD has step, momentum_buffer"):
        heavy.load_state_dict(state)
