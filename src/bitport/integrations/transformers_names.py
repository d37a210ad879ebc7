"""Map the names and grouping of tensors in files to those of transformers models.

Since version 5 many models are built differently from their files: experts are stacked, projections are concatenated,
and prefixes differ. transformers converts such files while reading them, according to a table; this module applies the
same table to quantized files, and to those that are loaded block by block.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bitport.checkpoint.arranged import Arrangement, arranged
from bitport.checkpoint.manifest import Entry, Manifest
from bitport.errors import CheckpointError
from bitport.integrations.components import is_component
from bitport.interop.skeleton import renaming

STACK, BESIDE, FLIP = "MergeModulelist", "Concatenate", "Transpose"
MOVES = ("Chunk", "Split", "PermuteForRope", "Interleave", "Inkling2UnpadVocab")
"""The supported operations of the table: stack tensors of experts; concatenate along the outputs; transpose; take some
of the outputs, or all in another order."""


def arrangement(model: Any) -> Arrangement:
    """Return the mapping from checkpoints with the names of files to ``model``, which transformers has built. Tensors
    under the model's own names are unchanged; those that transformers ignores are left out."""
    return lambda manifest: _arranged(model, manifest)


def _arranged(model: Any, manifest: Manifest) -> Manifest:
    own = model.state_dict()
    if is_component(model) or all(
        entry.buffer or _is(own.get(name), entry) for name, entry in manifest.tensors.items()
    ):
        return manifest
    rename, unused = _renaming(model, own), _unused(model)
    groups: dict[str, tuple[Any, dict[str, list[Entry]]]] = {}
    among: dict[str, list[str]] = {}
    for entry in sorted(manifest.tensors.values(), key=lambda entry: _natural(entry.name)):
        first, converter, pattern = rename(entry.name, entry)
        if first not in own and any(re.search(each, first) for each in unused):
            continue
        names = _names(first, converter)
        for name in names:
            among[name] = names
            known, found = groups.setdefault(name, (converter, {}))
            if found and (known is None or known is not converter):
                other = next(iter(found.values()))[0]
                raise CheckpointError(f"{other.name} and {entry.name} are both {name} of the model")
            found.setdefault(pattern, []).append(entry)
    built = _Built(model, own)
    tensors = {name: _made(name, converter, found, among[name], built) for name, (converter, found) in groups.items()}
    tied = {
        rename(alias, manifest.tensors[name])[0]: rename(name, manifest.tensors[name])[0]
        for alias, name in manifest.tied.items()
    }
    return Manifest(tensors, tied, manifest.shards, manifest.bitport)


def _unused(model: Any) -> set[str]:
    """Patterns of tensors that models ignore: buffers of older versions, layers for multi-token prediction."""
    buffers = {name.rpartition(".")[2] for name, _ in model.named_buffers()}
    older = {"inv_freq": r"rotary_emb\.inv_freq$", "position_ids": r"(^|\.)position_ids$"}
    found = {pattern for name, pattern in older.items() if name in buffers}
    return found | set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())


def _names(first: str, converter: Any) -> list[str]:
    """The names of all tensors that one tensor is converted to, given the ``first`` of them."""
    patterns = [""] if converter is None else converter.target_patterns
    return [first.replace(patterns[0], pattern) if at else first for at, pattern in enumerate(patterns)]


class _Built:
    """The model that transformers has built, as operations of its table see it: with parameters of whole numbers, since
    some cast to the dtype of a parameter, which must not round the numbers of outputs."""

    def __init__(self, model: Any, own: dict[str, Tensor]) -> None:
        self.config, self.own = model.config, own

    def get_parameter(self, name: str) -> Tensor:
        return torch.empty_like(self.own[name], dtype=torch.int64, device="meta")


def _made(name: str, converter: Any, found: dict[str, list[Entry]], among: list[str], built: _Built) -> Entry:
    """Build the entry of a model tensor. ``among``: the names of all that are made with it."""
    if converter is None:
        ((entry,),) = found.values()
        return entry if entry.name == name else arranged(name, [[entry]])
    if (one := _of_one(name, converter, found, among, built)) is not None:
        return one
    operations = [(type(operation).__name__, getattr(operation, "dim", None)) for operation in converter.operations]
    stack = (STACK, 0) in operations
    stacks = all(len(entry.shape) == 3 for entries in found.values() for entry in entries)
    axis = int(stacks and operations == [(BESIDE, 1)])
    known = [(STACK, 0)] * stack + [(BESIDE, int(stack) or axis)] * (len(operations) > stack)
    if operations != known:
        what = ", ".join(type(operation).__name__ for operation in converter.operations)
        raise CheckpointError(
            f"{name} is made of {next(iter(found.values()))[0].name} by {what} of transformers, which is done "
            f"to whole models alone: quantize the original as transformers loads it (bitport quantize --in-memory)"
        )
    columns = [found.get(pattern, []) for pattern in converter.source_patterns]
    if len({len(column) for column in columns}) > 1:
        raise CheckpointError(f"{name} lacks pieces: there are {[len(column) for column in columns]} of its parts")
    return arranged(name, [*zip(*columns, strict=True)], stack=stack, axis=axis)


def _of_one(name: str, converter: Any, found: dict[str, list[Entry]], among: list[str], built: _Built) -> Entry | None:
    """Some of the outputs of one tensor, or its transpose; None if ``converter`` does something else."""
    if [len(entries) for entries in found.values()] != [1]:
        return None
    ((entry,),) = found.values()
    kinds = [type(operation).__name__ for operation in converter.operations]
    if {*kinds} <= {*MOVES} and built.own.keys() >= {*among} and not entry.transposed and 0 not in entry.shape:
        return _moved(name, converter, entry, among, built)
    if kinds == [FLIP]:
        said, rank = vars(converter.operations[0]), len(entry.shape)
        if sorted((said["dim0"], said["dim1"])) == [rank - 2, rank - 1]:
            return arranged(name, [[entry]], flipped=not (said.get("check_dims") and _is(built.own.get(name), entry)))
    return None


def _moved(name: str, converter: Any, entry: Entry, among: list[str], built: _Built) -> Entry | None:
    """The outputs of ``entry`` that ``converter`` moves into ``name``: found out by what it does with their numbers.
    None if it moves anything else."""
    outer = entry.shape[:-1] or entry.shape
    numbers = torch.arange(math.prod(outer), device="cpu").reshape(*outer, *[1] * (len(entry.shape) > 1))
    held: dict[str, Any] = {converter.source_patterns[0]: [numbers]}
    said = {"source_patterns": converter.source_patterns, "target_patterns": converter.target_patterns}
    said |= {"full_layer_name": among[0], "model": built, "config": built.config}
    sizes = [built.own[each].shape[0] for each in among]
    try:
        for operation in converter.operations:
            held = operation.convert(held, **said)
        found, size = held[converter.target_patterns[among.index(name)]], sizes[among.index(name)]
        if len(found) != size or not size:
            raise ValueError
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{name} cannot be a part of {entry.name} {[*entry.shape]}: the parts of the model have {sizes} rows"
        ) from error
    for axis in range(min(len(outer), 2)):
        order = found.select(0, 0) if axis else found
        order = order.reshape(len(order), -1)[:, 0] // math.prod(outer[axis + 1 :])
        if int(order.max()) < outer[axis] and torch.equal(numbers.index_select(axis, order), found):
            return arranged(name, [[entry]], axis=axis, part=_range(order.tolist()))
    return None


def _range(rows: list[int]) -> Sequence[int]:
    """A range, if they follow each other."""
    all_of_them = range(rows[0], rows[-1] + 1)
    return all_of_them if [*all_of_them] == rows else tuple(rows)


def _is(own: Tensor | None, entry: Entry) -> bool:
    """Whether the shapes are equal."""
    return own is not None and tuple(own.shape) == entry.shape


def _renaming(model: Any, own: dict[str, Any]) -> Callable[[str, Entry], tuple[str, Any, str]]:
    """Return the function of :func:`renaming`, which leaves the name of an entry that the model has."""
    rename = renaming(model, own)
    return lambda name, entry: (name, None, "") if _is(own.get(name), entry) else rename(name)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key that orders numbers by value: expert 10 after expert 9."""
    parts = name.split(".")
    return [(0, int(part), "") if part.isdecimal() and len(part) < 19 else (1, 0, part) for part in parts]
