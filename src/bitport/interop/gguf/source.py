"""GGUF files of llama.cpp as a model of transformers: its tensors, config.json and tokenizer."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitport.checkpoint.dtypes import name_of
from bitport.errors import CheckpointError, shortened
from bitport.interop.checks import dtype_of_all, fits, within
from bitport.interop.codec import Described, kind_of, parts_of
from bitport.interop.gguf import grids, latent, unused
from bitport.interop.gguf.architectures import architecture
from bitport.interop.gguf.blocks import BLOCKS, FLOATS, BlockType, decoded
from bitport.interop.gguf.changes import codes_of_model, floats_of_model, misfit, rows_of_model
from bitport.interop.gguf.config import config_of
from bitport.interop.gguf.header import GgufTensor
from bitport.interop.gguf.keys import KEYS, Settings
from bitport.interop.gguf.names import CONFIGURING, OF_INPUTS, Piece, pieces, together
from bitport.interop.gguf.split_files import read_model
from bitport.interop.gguf.tokenizer import tokenizer_files, tokenizer_notes
from bitport.numerics import Quantized
from bitport.numerics.codec import block_scale
from bitport.schemes import Scheme
from bitport.schemes.experts import expert_blocks
from bitport.tensor import from_parts

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TRANSPOSED = "half of the matrix lies transposed in the file, with scales of numbers that are not neighbours here"
OF_TWO_TYPES = "the file has the rows of a matrix in two tensors, of different types"
LONGEST = 1 << 16
"""The most elements of a tensor that is part of the configuration."""


class Gguf:
    """``path``: the file of a model, or the first of several.

    A model computes in one dtype, which a file does not specify: here it is the first of bfloat16, float16 and float32
    that represents every float tensor of the file exactly.
    """

    format = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_model(path)
        self.paths = sorted({stored.file for stored in header.tensors.values()} | {path})
        with within(path):
            its = architecture(header.settings)
            vectors = {name: stored.read() for name, stored in header.tensors.items() if _configures(name, stored)}
            settings = Settings(header.settings, vectors)
            self.config, blocks = config_of(its, settings), settings.whole(KEYS["num_hidden_layers"])
            left = unused.in_file(header.tensors, self.config, blocks)
            idle = {name for names in left.values() for name in names}
            tensors = {name: stored for name, stored in header.tensors.items() if name not in idle}
            self.pieces = pieces(its, tensors, self.config)
            shapes = {piece.name: _shape(piece) for piece in self.pieces}
            self.scales = {piece.name: _scales(piece) for piece in self.pieces}
        check_types(path, header.tensors)
        vocabulary = shapes[EMBEDDING][0]
        for key in ("bos_token_id", "pad_token_id"):
            if (self.config[key] or 0) >= vocabulary:
                raise CheckpointError(f"{path}: the {key} {self.config[key]} is none of {vocabulary} tokens")
        self.tied = {} if HEAD in shapes else {HEAD: EMBEDDING}
        self.nbytes = sum(stored.nbytes for piece in self.pieces for stored in piece.stored)
        self.dtype = self._dtype()
        self.config |= {
            "vocab_size": vocabulary,
            "tie_word_embeddings": bool(self.tied),
            "dtype": name_of(self.dtype),
            **its.declares(first_layer(shapes)),
        }
        if self.config.get("hidden_size_per_layer_input"):
            self.config["vocab_size_per_layer_input"] = vocabulary
        apart = [name for name, scales in self.scales.items() if not _alike(scales)]
        self.notes = [
            *unused.notes(left),
            *scale_notes(tensors, apart),
            *self._notes(),
            *tokenizer_notes(header.settings),
        ]
        self.files = tokenizer_files(path, header.settings) if "tokenizer.ggml.model" in header.settings else {}

    def names(self) -> list[str]:
        return [piece.name for piece in self.pieces]

    def items(self) -> Iterator[tuple[str, Tensor]]:
        for piece in self.pieces:
            yield piece.name, self._read(piece)

    def described(self) -> Iterator[Described]:
        blocks = expert_blocks(self.names())
        for piece in self.pieces:
            if block := _block(piece):
                shape, name, scheme = _shape(piece), piece.name, self._scheme(piece, block)
                yield Described(name, scheme, shape, kind_of(name, shape, blocks), piece.transposed, parts_of(scheme))

    def others(self, quantization: dict[str, Any]) -> Iterator[tuple[Path, str | Path]]:
        said = {**self.config, **quantization}
        yield Path("config.json"), json.dumps(said, indent=2) + "\n"
        yield from self.files.items()

    def _read(self, piece: Piece) -> Tensor:
        block = _block(piece)
        if block is None:
            value = _floats(piece)
            return value if piece.change.wide and not fits(value, self.dtype) else value.to(self.dtype)
        with within(f"{self.path}: {piece.stored[0].name}"):
            parts, scheme = self._scaled(decoded(block, _rows(piece)), piece), self._scheme(piece, block)
            if order := piece.change.columns:
                parts = codes_of_model(parts, scheme.weight, order)
            return from_parts(parts, scheme, shape=_shape(piece), dtype=self.dtype, transposed=piece.transposed)

    def _scheme(self, piece: Piece, block: BlockType) -> Scheme:
        if _alike(self.scales[piece.name]):
            return block.scheme
        fmt = dataclasses.replace(block.scheme.weight, scale="float32", global_scale=False)
        return dataclasses.replace(block.scheme, weight=fmt)

    def _scaled(self, parts: Quantized, piece: Piece) -> Quantized:
        """If a matrix is made of parts with different global scales, these are multiplied into the block scales."""
        scales = self.scales[piece.name]
        if not scales:
            return parts
        if _alike(scales):
            return parts._replace(scale2=scales[0])
        rows = [scale.expand(*stored.shape[:-1], 1) for scale, stored in zip(scales, piece.stored, strict=True)]
        spread = rows_of_model(together(rows, piece.in_turn), piece.change)
        return parts._replace(scale=block_scale(parts.scale, spread), scale2=None)

    def _dtype(self) -> torch.dtype:
        floats = [piece for piece in self.pieces if not piece.change.wide]
        return dtype_of_all(lambda dtype: all(_fits(piece, dtype) for piece in floats))

    def _notes(self) -> Iterator[str]:
        floats = [
            piece for piece in self.pieces if _block(piece) is None and not BLOCKS.keys().isdisjoint(_types(piece))
        ]
        for reason, names in (
            (TRANSPOSED, [piece.name for piece in floats if piece.change.latent]),
            (OF_TWO_TYPES, [piece.name for piece in floats if piece.change.mixed]),
        ):
            if names:
                yield f"{shortened(names, 2)}: kept as floats, rounded to {self.dtype}, since {reason}"
        rope = self.config["rope_parameters"]
        if rope.get("llama_4_scaling_beta") == 0:
            yield (
                f"the file has no {latent.TEMPERATURE}, which llama.cpp's converter leaves out: if the model had it "
                f"(llama_4_scaling_beta), it differs after {rope['original_max_position_embeddings']} tokens"
            )
        yield from type_notes((stored.type for piece in self.pieces for stored in piece.stored), self.dtype)
        if rounded := [piece.name for piece in self.pieces if piece.change.less_one and _inexact(piece)]:
            yield f"weights of norms, less 1, are rounded to float32, by at most 2^-24: {shortened(rounded, 3)}"


def scale_notes(tensors: Iterable[str], apart: list[str]) -> Iterator[str]:
    """``tensors``: of the file; ``apart``: tensors of the model made of some whose scales differ."""
    if fixed := [name for name in tensors if name.endswith(f".{OF_INPUTS}")]:
        yield f"inputs are taken as they are; their scales in float4 are left out: {shortened(fixed, 3)}"
    if apart:
        yield (
            f"made of two tensors with scales of their own, and so with a scale in float32 for 16 weights, 6 bits for "
            f"each: {shortened(apart, 3)}"
        )


def type_notes(stored: Iterable[str], dtype: torch.dtype) -> Iterator[str]:
    """``stored``: types of tensors; ``dtype``: of the model."""
    types = dict.fromkeys(stored)
    if cast := [kind for kind in types if FLOATS.get(kind, dtype) != dtype]:
        yield f"float tensors ({', '.join(cast)}) are kept as {dtype}, which holds each number exactly"
    if sums := [kind for kind in types if kind in BLOCKS and BLOCKS[kind].scheme.weight.zero == "float"]:
        yield (
            f"{', '.join(sums)}: the minimum of a block is kept as a zero point, rounded to float32, so weights "
            f"differ from those of llama.cpp by at most 2^-24 of that minimum and 3 * 2^-24 of themselves"
        )


def check_types(path: Path, tensors: Mapping[str, GgufTensor]) -> None:
    """CheckpointError unless there are quantized weights; BitportError if their types need a missing library."""
    types = sorted({stored.type for stored in tensors.values()})
    if not any(kind in BLOCKS for kind in types):
        raise CheckpointError(
            f"{path} holds no quantized weight, only {', '.join(types)}: quantize the original model with "
            f"bitport quantize"
        )
    if gridded := [kind for kind in types if kind in grids.TYPES]:
        grids.library(f"{path} ({', '.join(gridded)})")


def first_layer(names: Iterable[str]) -> set[str]:
    """The parameters of the first layer. ``names``: of tensors of the model."""
    first = "model.layers.0."
    return {name.removeprefix(first) for name in names if name.startswith(first)}


def _configures(name: str, stored: Any) -> bool:
    if name not in CONFIGURING:
        return False
    if stored.type != "F32" or len(stored.shape) != 1 or stored.shape[0] > LONGEST:
        raise CheckpointError(f"{name} must be F32 of one dimension, not {stored.type} {list(stored.shape)}")
    return True


def _block(piece: Piece) -> BlockType | None:
    """How the tensor is quantized; None: it is floats."""
    return None if piece.change.latent or len(_types(piece)) > 1 else BLOCKS.get(piece.stored[0].type)


def _types(piece: Piece) -> set[str]:
    return {stored.type for stored in piece.stored}


def _shape(piece: Piece) -> tuple[int, ...]:
    """The shape of the tensor; CheckpointError if its parts do not match, or if their type is not allowed there."""
    first, *others = piece.stored
    if piece.change.latent:
        return _shape_of_latent(piece, *piece.change.latent)
    if piece.change.mixed:
        return _shape_of_mixed(piece, *piece.change.mixed.parts)
    shapes = [stored.shape for stored in piece.stored]
    sizes = {(len(shape), *(shape if piece.in_turn else shape[::2])) for shape in shapes}
    if len(_types(piece)) > 1 or len(sizes) > 1:
        told = ", ".join(f"{stored.name} {stored.type} {list(stored.shape)}" for stored in piece.stored)
        raise CheckpointError(f"{piece.name} is made of tensors of one type and size, not of {told}")
    dimensions = 2 if piece.name.endswith("bias") else 3
    if (others or piece.in_turn) and len(first.shape) != dimensions:
        raise CheckpointError(f"{first.name} is {list(first.shape)}, and must have {dimensions} dimensions")
    if first.type in BLOCKS and (len(first.shape) not in (2, 3) or piece.name.endswith("bias")):
        raise CheckpointError(f"{first.name} is {first.type} {list(first.shape)}: of matrices these types are read")
    _check_change(piece, first)
    _check_scales(piece)
    rows = sum(each.shape[1] for each in piece.stored) if others else 0
    shape = (first.shape[0], rows, *first.shape[2:]) if others else first.shape
    shape = (1, shape[-1]) if piece.change.one == 0 else shape
    shape = (shape[0], 1, shape[1]) if piece.change.one == 1 else shape
    return (shape[0], shape[2], shape[1]) if piece.transposed else shape


def _check_scales(piece: Piece) -> None:
    matrices = math.prod(piece.stored[0].shape[:-2])
    if strange := [each for each in piece.scales if each.type != "F32" or math.prod(each.shape) != matrices]:
        told = f"{strange[0].type} {list(strange[0].shape)}"
        raise CheckpointError(f"{strange[0].name} is {told}, and must be F32 [{matrices}], one number for a matrix")


def _shape_of_mixed(piece: Piece, *rows: int) -> tuple[int, ...]:
    columns = piece.stored[0].shape[-1]
    for stored, its in zip(piece.stored, rows, strict=True):
        if stored.shape != (its, columns):
            raise CheckpointError(f"{stored.name} is {list(stored.shape)}, and must be {[its, columns]}")
    _check_scales(piece)
    return sum(rows), columns


def _shape_of_latent(piece: Piece, keys: int, values: int) -> tuple[int, ...]:
    heads, rank = piece.stored[0].shape[:2] if len(piece.stored[0].shape) == 3 else (0, 0)
    for stored, shape in zip(piece.stored, ((heads, rank, keys), (heads, values, rank)), strict=True):
        if stored.shape != shape:
            raise CheckpointError(
                f"{piece.name} is made of [heads, rank, {keys}] and [heads, {values}, rank], but {stored.name} is "
                f"{list(stored.shape)}"
            )
    if piece.scales:
        raise CheckpointError(f"{piece.scales[0].name} is a scale, which {piece.name} has in no file of llama.cpp")
    return heads * (keys + values), rank


def _check_change(piece: Piece, first: GgufTensor) -> None:
    """CheckpointError unless ``first`` can be brought to the form of the model."""
    change, shape = piece.change, first.shape
    if (change.less_one or change.decay) and first.type != "F32":
        raise CheckpointError(f"{first.name} is {first.type}; a norm and a decay must be F32")
    if reason := misfit(shape, change):
        raise CheckpointError(f"{first.name} {reason}")
    if change.one == 0 and (first.type in BLOCKS or shape[:-1] not in ((), (1,))):
        raise CheckpointError(f"{first.name} is {first.type} {list(shape)}, and must be floats of one row")
    if change.one == 1 and (first.type in BLOCKS or len(shape) != 2):
        raise CheckpointError(f"{first.name} is {first.type} {list(shape)}, and must be floats of two dimensions")


def _rows(piece: Piece) -> Tensor:
    tensors = [stored.read() if len(_types(piece)) == 1 else numbers_of(stored) for stored in piece.stored]
    rows = tensors[0] if len(tensors) == 1 else together(tensors, piece.in_turn)
    return rows_of_model(rows, piece.change)


def _scales(piece: Piece) -> list[Tensor]:
    """The scales of the matrices of each of ``piece.stored``, [.., 1, 1]."""
    found = [stored.read().reshape(*piece.stored[0].shape[:-2], 1, 1) for stored in piece.scales]
    for stored, scale in zip(piece.scales, found, strict=True):
        if not bool(scale.isfinite().all()):
            raise CheckpointError(f"{stored.name} must be finite; fetch the file again")
    return found


def _alike(scales: list[Tensor]) -> bool:
    """Whether each matrix of the tensor has a single scale, as bitport requires."""
    return all(torch.equal(scale, scales[0]) for scale in scales)


def _floats(piece: Piece) -> Tensor:
    if piece.change.latent:
        return latent.joined(*map(numbers_of, piece.stored))
    rows = _rows(piece)
    return floats_of_model(rows.mT.contiguous() if piece.transposed else rows, piece.change)


def numbers_of(stored: GgufTensor) -> Tensor:
    """All numbers of a tensor, in float32 if it is quantized."""
    block = BLOCKS.get(stored.type)
    if block is None:
        return stored.read()
    parts = decoded(block, stored.read())
    return from_parts(parts, block.scheme, shape=stored.shape, dtype=torch.float32).dequantize()


def _fits(piece: Piece, dtype: torch.dtype) -> bool:
    """Whether ``dtype`` has each number that the file has as a float."""
    floats = [stored for stored in piece.stored if stored.type in FLOATS]
    if all(FLOATS[stored.type] == dtype for stored in floats):
        return True
    if len(floats) < len(piece.stored):
        return all(fits(stored.read(), dtype) for stored in floats)
    return fits(_floats(piece), dtype)


def _inexact(piece: Piece) -> bool:
    value = _rows(piece).double() - 1
    return bool((value.float().double() != value).any())
