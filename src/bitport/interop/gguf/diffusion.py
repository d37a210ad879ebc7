"""GGUF files of diffusion models as a model of diffusers.

Their tensors have the names of the model's first publication, and there is no configuration. A tensor whose rows are
not whole blocks may be stored with rows of another length; its shape is then a setting,
``comfy.gguf.orig_shape.<name>``. So tensors are mapped by ranges of elements in row-major order, rather than by rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from reprlib import repr as short
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitport.errors import ArgumentError, CheckpointError, shortened
from bitport.interop.checks import dtype_of_all, fits, within
from bitport.interop.codec import Described, kind_of, parts_of
from bitport.interop.diffusers_model import Component, unused_notes
from bitport.interop.gguf.architectures import ARCHITECTURES
from bitport.interop.gguf.blocks import BLOCKS, FLOATS, BlockType, decoded
from bitport.interop.gguf.header import GgufTensor, Header
from bitport.interop.gguf.source import check_types, numbers_of, type_notes
from bitport.interop.gguf.split_files import read_model
from bitport.interop.tracing import Run, TracedTensor, in_rows
from bitport.schemes.experts import expert_blocks
from bitport.tensor import from_parts

SHAPE = "comfy.gguf.orig_shape."
MOST_DIMENSIONS = 8


class Cut(NamedTuple):
    """A range of elements of a stored tensor. ``stored``: the part that contains them, as rows of one block each or as
    floats; ``skip``: leading elements of the first block that are not used."""

    stored: GgufTensor
    skip: int
    size: int


class Piece(NamedTuple):
    """One tensor of the model. ``cuts``: its elements, in order. ``block``: None for floats; ``whole``: each row is
    whole blocks, and the module can be quantized."""

    name: str
    shape: tuple[int, ...]
    cuts: tuple[Cut, ...]
    block: BlockType | None
    whole: bool


class Diffusion:
    """``path``: the file of a model, or the first of several; ``config``: a config.json of diffusers, or the directory
    that holds it. The dtype of the model is chosen as in :class:`bitport.interop.gguf.source.Gguf`; weights that cannot
    stay quantized require float32."""

    format = "gguf"

    def __init__(self, path: Path, config: Path) -> None:
        self.path = path
        header = read_model(path)
        name = header.settings.get("general.architecture")
        if isinstance(name, str) and name in ARCHITECTURES:
            raise ArgumentError(
                f"{path} is a language model ({name}), which says its own configuration: give no config"
            )
        check_types(path, header.tensors)
        self.component = Component(config, len(header.tensors))
        with within(path):
            made = self.component.made_of(_shapes(header))
            self.pieces = [_piece(name, each, header.tensors, self.component) for name, each in made.items()]
        self.tied: dict[str, str] = {}
        self.nbytes = sum(stored.nbytes for stored in header.tensors.values())
        self.dtype = self._dtype()
        self.notes = [*self._notes(), *unused_notes(header.tensors, made)]

    def names(self) -> list[str]:
        return [piece.name for piece in self.pieces]

    def items(self) -> Iterator[tuple[str, Tensor]]:
        for piece in self.pieces:
            yield piece.name, self._read(piece)

    def described(self) -> Iterator[Described]:
        blocks = expert_blocks(self.names())
        for name, shape, _, block, whole in self.pieces:
            if block and whole:
                yield Described(name, block.scheme, shape, kind_of(name, shape, blocks), False, parts_of(block.scheme))

    def others(self, quantization: dict[str, Any]) -> Iterator[tuple[Path, str | Path]]:
        return self.component.files(quantization)

    def _read(self, piece: Piece) -> Tensor:
        _, shape, cuts, block, whole = piece
        with within(f"{self.path}: {cuts[0].stored.name}"):
            if block is None or not whole:
                return torch.cat([_floats(cut).to(self.dtype) for cut in cuts]).reshape(shape)
            raw = torch.cat([cut.stored.read() for cut in cuts]).reshape(shape[0], -1)
            return from_parts(decoded(block, raw), block.scheme, shape=shape, dtype=self.dtype)

    def _dtype(self) -> torch.dtype:
        if any(piece.block and not piece.whole for piece in self.pieces):
            return torch.float32
        cuts = [cut for piece in self.pieces if piece.block is None for cut in piece.cuts]
        return dtype_of_all(lambda dtype: all(_fits(cut, dtype) for cut in cuts))

    def _notes(self) -> Iterator[str]:
        yield from type_notes((cut.stored.type for piece in self.pieces for cut in piece.cuts), self.dtype)
        if floats := [piece.name for piece in self.pieces if piece.block and not piece.whole]:
            yield (
                f"not quantized any more, but floats, as bitport holds blocks within rows of linear, convolution and "
                f"embedding layers: {shortened(floats, 3)}"
            )


def _shapes(header: Header) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors before they were written."""
    found = {}
    for name, stored in header.tensors.items():
        said = header.settings.get(SHAPE + name, list(stored.shape))
        whole = isinstance(said, list) and all(type(size) is int and size > 0 for size in said)
        if not whole or len(said) > MOST_DIMENSIONS or math.prod(said) != math.prod(stored.shape):
            raise CheckpointError(
                f"{SHAPE}{name} is {short(said)}, and must be the sizes of {math.prod(stored.shape)} numbers"
            )
        found[name] = tuple(said)
    return found


def _piece(name: str, made: TracedTensor, tensors: Mapping[str, GgufTensor], component: Component) -> Piece:
    assert made.runs is not None
    types = {tensors[run.name].type for run in made.runs}
    block = BLOCKS.get(next(iter(types)))
    if len(types) > 1 and not types.issubset(FLOATS):
        told = ", ".join(f"{run.name} {tensors[run.name].type}" for run in made.runs)
        raise CheckpointError(f"{name} is made of tensors of one type, not of {told}")
    shape = component.shapes[name]
    cuts = tuple(_cut(tensors[run.name], run, block.elements if block else 1) for run in made.runs)
    row = math.prod(shape[1:])
    blocks = block is not None and row % block.elements == 0
    whole = blocks and name in component.quantizable and in_rows(made.runs, row)
    return Piece(name, shape, cuts, block, whole)


def _cut(stored: GgufTensor, run: Run, elements: int) -> Cut:
    """The stored part for ``run``. ``elements``: of a block."""
    first, end = run.first // elements, -(-run.end // elements)
    nbytes = stored.nbytes * elements // math.prod(stored.shape)
    shape = (end - first, elements) if elements > 1 else (end - first,)
    part = dataclasses.replace(stored, shape=shape, start=stored.start + first * nbytes, nbytes=(end - first) * nbytes)
    return Cut(part, run.first - first * elements, run.end - run.first)


def _floats(cut: Cut) -> Tensor:
    return numbers_of(cut.stored).flatten()[cut.skip : cut.skip + cut.size]


def _fits(cut: Cut, dtype: torch.dtype) -> bool:
    return FLOATS[cut.stored.type] == dtype or fits(cut.stored.read(), dtype)
