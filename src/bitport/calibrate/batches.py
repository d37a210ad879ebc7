"""Calibration data: batches that a model runs on, given as such, or recorded from a function.

A batch is passed as the model's arguments: a tensor as one, a tuple or list as several, a mapping (a dict, or what a
tokenizer gives) as keywords.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from textwrap import shorten
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from bitport.calibrate.contexts import evaluating
from bitport.errors import ArgumentError


class Call(NamedTuple):
    """A batch of positional and keyword arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def run_batch(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Call):
        return model(*batch.args, **batch.kwargs)
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


def run_fresh(module: nn.Module, batch: Any, *, gradients: bool = False) -> Any:
    """Run on a copy of the batch, because a module may modify its inputs."""
    with torch.set_grad_enabled(gradients):
        return run_batch(module, _copied(batch))


def _copied(batch: Any) -> Any:
    return each_once(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf), batch)


def each_once(change: Callable[[Any], Any], batch: Any) -> Any:
    """Apply ``change`` to every leaf. Repeated leaves stay identical: attention checks if its keys are its queries."""
    changed: dict[int, Any] = {}

    def once(leaf: Any) -> Any:
        if id(leaf) not in changed:
            changed[id(leaf)] = change(leaf)
        return changed[id(leaf)]

    return tree_map(once, batch)


def each_batch(calibrate: Iterable[Any]) -> Iterator[Any]:
    """Iterate over batches, converting all mappings to dicts, which pytree can flatten. Texts and lists of token ids,
    as other libraries take them, are refused: the model would refuse them without a word on calibration."""
    if isinstance(calibrate, (str, Tensor, Mapping)):
        raise ArgumentError(f"calibrate is a single {type(calibrate).__name__}: give a list of batches")
    if not isinstance(calibrate, Iterable):
        raise ArgumentError(
            f"calibrate is a list of batches, or a function that runs the model that it is given, not {calibrate!r}"
        )
    return map(_batch, calibrate)


def _batch(batch: Any) -> Any:
    found = dict(batch) if isinstance(batch, Mapping) else batch
    leaves = tree_leaves(found)
    if leaves and all(isinstance(leaf, (str, int, float)) for leaf in leaves):
        raise ArgumentError(
            f"a batch is a tensor, or a tuple or dict of the model's arguments, not {shorten(repr(batch), 60)}: make "
            "one of a text by tokenizer(text, return_tensors='pt'). A model of other inputs takes a function: "
            "calibrate=lambda model: .."
        )
    mask = found.get("attention_mask") if isinstance(found, dict) else None
    if isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.all()):
        warnings.warn(
            "calibration batches hold padding (attention_mask is 0 there), which counts as any other input: give "
            "sequences of different lengths as separate batches",
            stacklevel=2,
        )
    return found


def batches_of(model: nn.Module, calibrate: Iterable[Any] | Callable[[nn.Module], Any]) -> list[Any]:
    """Return ``calibrate`` as a list that can be run repeatedly. A function is called once with the model; each of its
    calls of the model becomes a batch, with copies of its arguments."""
    if not callable(calibrate):
        return list(each_batch(calibrate))
    calls: list[Any] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(Call(*_copied((args, kwargs))))

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with evaluating(model):
            calibrate(model)
    finally:
        hook.remove()
    return calls
