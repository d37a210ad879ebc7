"""Diffusion models in float8 as ComfyUI has them, one file of safetensors without a configuration::

    <layer>.weight         float8_e4m3fn or float8_e5m2 [N, K]
    <layer>.scale_weight   one number; 1 where it is absent
    <layer>.scale_input    one number, by which some programs round inputs
    scaled_fp8             marks such files, and says nothing more

    value = weight * scale_weight

Names are those of the model's first publication.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitport.checkpoint.manifest import shortened
from bitport.checkpoint.safetensors_reader import SafetensorsReader, Span
from bitport.errors import ArgumentError, CheckpointError
from bitport.interop.checks import dtype_of_all, expect, fits
from bitport.interop.codec import Described, kind_of
from bitport.interop.component import PREFIX, Component, unused_notes
from bitport.interop.tracing import Made, Run, in_rows
from bitport.numerics import Format, Quantized
from bitport.schemes import Scheme
from bitport.schemes.presets import TENSOR
from bitport.tensor import from_parts

SUFFIX = ".safetensors"
FLOAT8 = {torch.float8_e4m3fn: "float8_e4m3", torch.float8_e5m2: "float8_e5m2"}
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
SCALE, INPUT, MARK = "scale_weight", "scale_input", ("scaled_fp8", f"{PREFIX}scaled_fp8")
LATER = ("weight_scale", "weight_scale_2", "input_scale", "comfy_quant")
"""What the same is called, and by which format it is to be read, in files that have several formats."""


class Piece(NamedTuple):
    """One tensor of the model. ``scheme``: None for floats."""

    name: str
    shape: tuple[int, ...]
    runs: tuple[Run, ...]
    scheme: Scheme | None


class ScaledFloat8:
    """``path``: the file of a model; ``config``: as for :class:`bitport.interop.gguf.Diffusion`, and so the dtype of
    the model."""

    format = "scaled float8"

    def __init__(self, path: Path, config: Path) -> None:
        self.path = path
        self.tied: dict[str, str] = {}
        with SafetensorsReader(path) as reader:
            held = reader.tensors
            if not any(span.dtype in FLOAT8 for span in held.values()):
                raise CheckpointError(f"{path} holds no weight in float8: quantize it with bitport quantize")
            self.nbytes = sum(span.end - span.start for span in held.values())
            self.component = Component(config, len(held))
            try:
                self.scales = dict(_scales(reader))
                made = self.component.made_of(_shapes(held))
                self.pieces = [_piece(name, each, held, self.component) for name, each in made.items()]
            except CheckpointError as error:
                raise CheckpointError(f"{path}: {error}") from error
            self.dtype = dtype_of_all(lambda dtype: all(self._fits(piece, dtype, reader) for piece in self.pieces))
        self.notes = [*self._notes(held), *unused_notes(_shapes(held), made)]

    def names(self) -> list[str]:
        return [piece.name for piece in self.pieces]

    def items(self) -> Iterator[tuple[str, Tensor]]:
        with SafetensorsReader(self.path, mapped=True) as reader:  # several pieces are rows of one tensor
            for piece in self.pieces:
                yield piece.name, self._read(piece, reader)

    def described(self) -> Iterator[Described]:
        for name, shape, _, scheme in self.pieces:
            if scheme is not None:
                yield Described(name, scheme, shape, kind_of(name, shape), False, frozenset({"qdata", "scale"}))

    def others(self, quantization: dict[str, Any]) -> Iterator[tuple[Path, str | Path]]:
        return self.component.files(quantization)

    def _read(self, piece: Piece, reader: SafetensorsReader) -> Tensor:
        if piece.scheme is None:
            return torch.cat([each.to(self.dtype) for each in self._floats(piece, reader)]).reshape(piece.shape)
        codes = {run.name: reader.read(run.name) for run in piece.runs}
        name, tensor = next(iter(codes.items()))
        data = torch.cat([codes[run.name].view(torch.uint8).flatten()[run.first : run.end] for run in piece.runs])
        parts = Quantized(data.view(tensor.dtype).reshape(piece.shape[0], -1), self._scale(name).reshape(1, 1))
        try:
            return from_parts(parts, piece.scheme, shape=piece.shape, dtype=self.dtype)
        except ArgumentError as error:
            raise CheckpointError(f"{self.path}: {name}: {error}") from error

    def _floats(self, piece: Piece, reader: SafetensorsReader) -> Iterator[Tensor]:
        for name, first, end in piece.runs:
            value = reader.read(name)
            value = value.float() * self._scale(name) if value.dtype in FLOAT8 else value
            yield value.flatten()[first:end]

    def _scale(self, name: str) -> Tensor:
        return self.scales.get(name, torch.ones(()))

    def _fits(self, piece: Piece, dtype: torch.dtype, reader: SafetensorsReader) -> bool:
        if piece.scheme is not None:
            return True
        same = {reader.tensors[run.name].dtype for run in piece.runs} == {dtype}
        return same or all(fits(value, dtype) for value in self._floats(piece, reader))

    def _notes(self, held: Mapping[str, Span]) -> Iterator[str]:
        if any(name.endswith(f".{INPUT}") for name in held):
            yield f"left out: {INPUT}, by which some programs round inputs; here they are used as they are"
        floats = [
            piece.name
            for piece in self.pieces
            if piece.scheme is None and any(held[run.name].dtype in FLOAT8 for run in piece.runs)
        ]
        if floats:
            yield f"not float8 any more, but {self.dtype}, as they are no weights of layers: {shortened(floats, 3)}"


def _shapes(held: Mapping[str, Span]) -> dict[str, tuple[int, ...]]:
    """Of the tensors of the model."""
    found = {}
    for name, span in held.items():
        last = name.rpartition(".")[2]
        if last in LATER:
            raise CheckpointError(f"{name} is of a later form of ComfyUI; {SCALE} is read: take another file")
        if name not in MARK and last not in (SCALE, INPUT):
            found[name] = span.shape
    return found


def _scales(reader: SafetensorsReader) -> Iterator[tuple[str, Tensor]]:
    """Name of a weight -> float32, one number."""
    for name, span in reader.tensors.items():
        layer, _, last = name.rpartition(".")
        weight = reader.tensors.get(f"{layer}.weight")
        if last != SCALE:
            continue
        if weight is None:
            raise CheckpointError(f"{name} is there without {layer}.weight; fetch the file again")
        scale = expect(reader.read(name), name, FLOATS, (1,) * min(len(span.shape), 1)).float().reshape(())
        if weight.dtype not in FLOAT8 and float(scale) != 1:
            raise CheckpointError(f"{name} is {float(scale):g}, and {layer}.weight is {weight.dtype}, not float8")
        yield f"{layer}.weight", scale


def _piece(name: str, made: Made, held: Mapping[str, Span], component: Component) -> Piece:
    """Rows of one tensor in float8 stay so, and all else becomes floats."""
    assert made.runs is not None
    for run in made.runs:
        if held[run.name].dtype not in (*FLOATS, *FLOAT8):
            told = ", ".join(str(dtype) for dtype in (*FLOATS, *FLOAT8))
            raise CheckpointError(f"{run.name} is {held[run.name].dtype}; {told} are read in such files")
    shape, sources = component.shapes[name], {run.name for run in made.runs}
    dtype, row = held[made.runs[0].name].dtype, math.prod(shape[1:])
    whole = len(sources) == 1 and dtype in FLOAT8 and name in component.quantizable and in_rows(made.runs, row)
    scheme = Scheme(weight=Format(dtype=FLOAT8[dtype], block=TENSOR)) if whole else None
    return Piece(name, shape, made.runs, scheme)
