"""Calibration data: batches that a model runs on, given as such, or recorded from a function.

A batch is passed as the model's arguments: a tensor as one, a tuple or list as several, a dict as keywords.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


class Call(NamedTuple):
    """A batch of positional and keyword arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def run_batch(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Call):
        return model(*batch.args, **batch.kwargs)
    if isinstance(batch, dict):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


def run_fresh(module: nn.Module, batch: Any) -> Any:
    """On a copy of the batch, as a module may change what it is given; without gradients."""
    fresh = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf), batch)
    with torch.no_grad():
        return run_batch(module, fresh)


def batches_of(model: nn.Module, calibrate: Iterable[Any] | Callable[[nn.Module], Any]) -> list[Any]:
    """``calibrate`` as a list that can be run again and again. A function is called once with the model; its calls of
    the model are the batches, with copies of what they were given."""
    if not callable(calibrate):
        return list(calibrate)
    calls: list[Any] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(Call(copy.deepcopy(args), copy.deepcopy(kwargs)))

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.no_grad():
            calibrate(model)
    finally:
        hook.remove()
    return calls
