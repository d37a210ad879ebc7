"""Calibration data: batches that a model runs on, given as such, recorded from a function, or cut from a text.

A batch is passed as the model's arguments: a tensor as one, a tuple or list as several, a dict as keywords.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from bitport.errors import ArgumentError


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


def text_batches(
    path: str | Path, encode: Callable[[str], Sequence[int]], *, window: int = 512, tokens: int = 65536
) -> list[Tensor]:
    """Token ids [1, window] of the first ``tokens`` tokens of a UTF-8 text; the last one may be shorter.

    Of a file named .jsonl the field "text" of each line, one document after the other. ``encode``: text -> token ids.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"cannot read {file} as UTF-8 text: {error}") from error
    documents = _documents(file, text) if file.suffix == ".jsonl" else [text]
    ids: list[int] = []
    for document in documents:
        if len(ids) < tokens:
            ids += list(encode(document))
    if len(ids) < 2:
        raise ArgumentError(f"{file} gives {len(ids)} tokens; calibration needs a text of at least two")
    return [piece[None] for piece in torch.tensor(ids[:tokens], dtype=torch.int64).split(window)]


def _documents(file: Path, text: str) -> list[str]:
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ArgumentError(f"{file}, line {number}: not JSON: {error}") from error
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise ArgumentError(f'{file}, line {number}: each line must be an object with a string "text"')
        found.append(row["text"])
    return found
