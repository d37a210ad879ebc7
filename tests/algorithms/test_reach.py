"""Which weights' inputs depend on a parameter: those that change with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bitport.algorithms.reach import Reach
from bitport.algorithms.trial import Trial
from bitport.calibrate.batches import Call

from .families import calls_of, model_of


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "bert", "mixtral", "deepseek"])
def test_inputs_that_change_with_a_parameter(name: str) -> None:
    """And no others: each of these models uses every piece of memory once, and no part of it is always off."""
    model = model_of(name)
    block, args, kwargs = calls_of(model, name)[0]
    trial = Trial(model.get_submodule(block), [Call(args, kwargs)])
    params = dict(trial.block.named_parameters())
    changed = {}
    for each, param in params.items():
        with trial.undone([each]):
            param.data += torch.rand_like(param)
            run = trial.run()
        changed[each] = {weight for weight in trial.weights if not _same(trial, weight, run)}
    assert trial.reached(params) == changed


def _same(trial: Trial, weight: str, run: object) -> bool:
    return all(now is not None and torch.equal(was, now) for _, was, now in trial.compared(weight, run))  # type: ignore[arg-type]


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a product": lambda x, w: x @ w,
    "a view": lambda x, w: w.t()[1:],
    "into a slice": lambda x, w: _written(x, w),
    "in place": lambda x, w: x.clone().add_(w),
    "out": lambda x, w: torch.add(x, w, out=torch.empty(3, 3)),
    "of several": lambda x, w: torch.cat([x, w]).split(3)[0],
    "in a map": lambda x, w: torch.vmap(lambda row: row @ w)(x),
    "unseen": lambda x, w: torch.from_numpy(x.numpy() + w.detach().numpy()),
}


def _written(x: Tensor, w: Tensor) -> Tensor:
    y = x.clone()
    view = y[0]
    y[1] = w[1]
    return view


@pytest.mark.parametrize("how", FUNCTIONS)
def test_what_a_parameter_has_a_part_in(how: str) -> None:
    module, x = nn.Linear(3, 3), torch.randn(3, 3)
    reach = Reach(module, ["weight", "bias"])
    reach.begin(x)
    with reach, torch.no_grad():
        y = FUNCTIONS[how](x, module.weight)
    assert "weight" in reach.of(y)
    assert reach.of(x) == frozenset()
