"""A diffusers model whose weights are rows of those in a file of ComfyUI. Names in the file are those of the model's
first publication."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitport.checkpoint.safetensors_reader import SafetensorsReader, Span
from bitport.errors import CheckpointError, shortened
from bitport.interop.checks import dtype_of_all, fits, within
from bitport.interop.codec import Described, kind_of, parts_of
from bitport.interop.comfy.stored import INPUTS, ComfyWeight, is_role, stored_in
from bitport.interop.diffusers_model import Component, unused_notes
from bitport.interop.tracing import Run, TracedTensor, in_rows
from bitport.numerics import FLOATS, Quantized
from bitport.schemes.experts import expert_blocks
from bitport.schemes.presets import TENSOR
from bitport.tensor import from_parts

SUFFIX = ".safetensors"


class Piece(NamedTuple):
    """One tensor of the model. ``of``: the quantized weight whose rows it consists of; None for floats."""

    name: str
    shape: tuple[int, ...]
    runs: tuple[Run, ...]
    of: ComfyWeight | None


class Comfy:
    """``path``: the file of a model; ``config``: as for :class:`bitport.interop.gguf.Diffusion`, which also applies to
    the dtype of the model."""

    def __init__(self, path: Path, config: Path) -> None:
        self.path = path
        self.tied: dict[str, str] = {}
        with SafetensorsReader(path) as reader:
            held = reader.tensors
            self.nbytes = sum(span.end - span.start for span in held.values())
            with within(path):
                self.stored = stored_in(reader)
            if not self.stored:
                raise CheckpointError(f"{path} holds no quantized weight: quantize it with bitport quantize")
            bfl = all(weight.unnamed for weight in self.stored.values())
            self.format = "Black Forest Labs" if bfl else "ComfyUI"
            self.component = Component(config, len(held))
            with within(path):
                shapes = {name: span.shape for name, span in held.items() if not is_role(name)}
                shapes |= {name: each.shape for name, each in self.stored.items()}
                made = self.component.made_of(shapes)
                self.pieces = [self._piece(name, each, held) for name, each in made.items()]
            self.dtype = dtype_of_all(lambda dtype: all(self._fits(piece, dtype, reader) for piece in self.pieces))
        self.notes = [*self._notes(held), *unused_notes(shapes, made)]

    def names(self) -> list[str]:
        return [piece.name for piece in self.pieces]

    def items(self) -> Iterator[tuple[str, Tensor]]:
        with SafetensorsReader(self.path, mapped=True) as reader:  # several pieces may be rows of one tensor
            for piece in self.pieces:
                with within(f"{self.path}: {piece.name}"):
                    yield piece.name, self._read(piece, reader)

    def described(self) -> Iterator[Described]:
        blocks = expert_blocks(self.names())
        for name, shape, _, of in self.pieces:
            if of is not None:
                parts = parts_of(of.scheme) | ({"pre_scale"} if of.before else set())
                yield Described(name, of.scheme, shape, kind_of(name, shape, blocks), False, parts)

    def others(self, quantization: dict[str, Any]) -> Iterator[tuple[Path, str | Path]]:
        return self.component.files(quantization)

    def _piece(self, name: str, made: TracedTensor, held: Mapping[str, Span]) -> Piece:
        """Rows of a single quantized weight stay quantized; everything else becomes floats."""
        assert made.runs is not None
        for run in made.runs:
            if run.name not in self.stored and held[run.name].dtype not in FLOATS:
                told = ", ".join(map(str, FLOATS))
                raise CheckpointError(
                    f"{run.name} is {held[run.name].dtype}, and nothing says in which format; without one {told} are "
                    "read"
                )
        shape, sources = self.component.shapes[name], {run.name for run in made.runs}
        of, row = self.stored.get(made.runs[0].name), math.prod(shape[1:])
        if len(sources) > 1 or of is None or name not in self.component.quantizable or not in_rows(made.runs, row):
            return Piece(name, shape, made.runs, None)
        same = of.scheme.weight.block == TENSOR or of.matrix[1] == row
        return Piece(name, shape, made.runs, of if same else None)

    def _read(self, piece: Piece, reader: SafetensorsReader) -> Tensor:
        if piece.of is None:
            return torch.cat([each.to(self.dtype) for each in self._floats(piece, reader)]).reshape(piece.shape)
        whole, row = piece.of.read(reader.read), math.prod(piece.shape[1:])
        at = torch.cat([torch.arange(run.first // row, run.end // row) for run in piece.runs])
        data = whole.data.reshape(-1, row * piece.of.scheme.weight.number.bits // 8)
        scale = whole.scale if whole.scale.shape[0] == 1 else _rows(whole.scale, at)
        parts = Quantized(_rows(data, at), scale, None, whole.scale2)
        before = piece.of.factors(reader.read)
        return from_parts(parts, piece.of.scheme, shape=piece.shape, dtype=self.dtype, pre_scale=before)

    def _floats(self, piece: Piece, reader: SafetensorsReader) -> Iterator[Tensor]:
        for name, first, end in piece.runs:
            of = self.stored.get(name)
            if of is None:
                value = reader.read(name)
            else:
                whole = from_parts(of.read(reader.read), of.scheme, shape=of.matrix, dtype=torch.float32)
                value = whole.replace(pre_scale=of.factors(reader.read)).dequantize()
            yield value.flatten()[first:end]

    def _fits(self, piece: Piece, dtype: torch.dtype, reader: SafetensorsReader) -> bool:
        if piece.of is not None:
            return True
        same = {reader.tensors[run.name].dtype for run in piece.runs} == {dtype}
        return same or all(fits(value, dtype) for value in self._floats(piece, reader))

    def _notes(self, held: Mapping[str, Span]) -> Iterator[str]:
        if rounds := sorted({name.rpartition(".")[2] for name in held} & {*INPUTS}):
            yield f"left out: {', '.join(rounds)}, by which some programs round inputs; here they are used as they are"
        floats = [
            piece.name
            for piece in self.pieces
            if piece.of is None and any(run.name in self.stored for run in piece.runs)
        ]
        if floats:
            yield (
                f"not quantized any more, but {self.dtype}, as they are no weights of layers, or not in whole rows: "
                f"{shortened(floats, 3)}"
            )


def _rows(tensor: Tensor, at: Tensor) -> Tensor:
    """Select rows as bytes, since PyTorch does not support indexing for every dtype."""
    return tensor.view(torch.uint8)[at].view(tensor.dtype)
