"""The sources of a conversion, read tensor by tensor: quantized checkpoints of other libraries, and of bitport."""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from bitport.checkpoint.dtypes import DTYPES, WEIGHT_DTYPES
from bitport.checkpoint.load import read_plain
from bitport.checkpoint.manifest import NAME as MANIFEST
from bitport.checkpoint.manifest import Entry
from bitport.checkpoint.names import target_of
from bitport.checkpoint.parse import read_manifest
from bitport.checkpoint.safetensors_reader import SafetensorsReader
from bitport.checkpoint.shards import Shards
from bitport.checkpoint.side_files import carried, check_others
from bitport.checkpoint.source import Source
from bitport.errors import ArgumentError, BitportError, CheckpointError
from bitport.interop import comfy, gguf
from bitport.interop.checks import Stored, within
from bitport.interop.codec import Described, Reader, WeightNames, kind_of
from bitport.interop.formats import READERS
from bitport.interop.skeleton import shapes_of
from bitport.numerics import FLOATS
from bitport.schemes.experts import expert_blocks
from bitport.tensor import QTensor

MISTRAL = "params.json"
"""The configuration file of Mistral's own programs, instead of a config.json. Such checkpoints use other tensor names
and another order of rows in query and key projections."""


class Readable(Protocol):
    format: str
    path: Path
    nbytes: int
    tied: dict[str, str]
    """Alias -> name."""

    @property
    def notes(self) -> list[str]:
        """Complete once items() is exhausted."""

    def names(self) -> list[str]:
        """The names of the tensors that items() yields."""

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name in the float model, tensor); quantized weights are QTensors in the plain layout."""

    def described(self) -> Iterator[Described]:
        """The quantized weights, as far as they are known without reading any data."""

    def others(self, quantization: dict[str, Any]) -> Iterator[tuple[Path, str | Path]]:
        """Yield the other files of the model: (name in its directory, text or the file that holds it).
        ``quantization``: the keys of config.json that describe the quantization."""


class Foreign:
    """The checkpoint of another library in the directory ``path``, whose config.json names the quantization method."""

    def __init__(self, path: Path) -> None:
        self.files = Source(path, quantized=True)
        said = self.files.quantization
        if said is None and not self.files.config and (path / MISTRAL).is_file():
            raise CheckpointError(
                f"{path} is in Mistral's own form ({MISTRAL}), which is not read: take the files of the model that "
                f"come with a config.json"
            )
        if said is None:
            theirs = any(comfy.is_theirs(name, held.dtype) for name, held in self.files.tensors.items())
            raise CheckpointError(
                f"{path} does not say that it is quantized (quantization_config in config.json): quantize it with "
                f"bitport quantize{'; if it is a diffusion model of ComfyUI, give its --config' if theirs else ''}"
            )
        self.path, self.format = path, str(said.get("quant_method"))
        if self.format not in READERS:
            how = (
                f"by {reprlib.repr(self.format)}" if said.get("quant_method") else "and does not say how (quant_method)"
            )
            raise CheckpointError(f"{path} is quantized {how}; {', '.join(READERS)} are read")
        with within(path):
            self.reader: Reader = READERS[self.format](said, self._dtype())
            self.reader.metadata, self.reader.model = self.files.metadata, self.files.config
            self.weights = self.reader.weights(self.files.stored)
        names = {weight.name for weight in self.weights}
        self.tied = {alias: name for alias, name in self.files.tied.items() if alias not in names}
        dropped = {**self.reader.dropped(self.files.stored), **self._zero_biases()}
        self.notes = [*dict.fromkeys(f"left out: {reason}" for reason in dropped.values()), *self.reader.notes]
        self.first: dict[str, WeightNames] = {}
        """The first tensor of each weight, at which items() yields the weight -> weight."""
        self.rest = set(dropped)
        order = {name: at for at, name in enumerate(self.files.stored)}
        for weight in self.weights:
            first, *others = sorted(weight.parts.values(), key=order.__getitem__)
            self.first[first] = weight
            self.rest.update(others)
        self._check_others()
        self.nbytes = sum(held.nbytes for held in self.files.stored.values())

    def names(self) -> list[str]:
        weights = {first: weight.name for first, weight in self.first.items()}
        return [weights.get(name, name) for name in self.files.stored if name not in self.rest]

    def items(self) -> Iterator[tuple[str, Tensor]]:
        with contextlib.ExitStack() as stack:
            opened: dict[Path, SafetensorsReader] = {}

            def read(name: str) -> Tensor:
                file = self.files.stored[name].file
                if file not in opened:
                    opened[file] = stack.enter_context(SafetensorsReader(file))
                return opened[file].read(name)

            for name in self.files.stored:
                if weight := self.first.get(name):
                    yield weight.name, self._read(weight.read(read))
                elif name not in self.rest:
                    yield name, read(name)

    def described(self) -> Iterator[Described]:
        yield from ()

    def others(self, quantization: dict[str, Any]) -> Iterator[tuple[Path, str | Path]]:
        return carried(self.path, quantization)

    def _read(self, weight: Stored) -> Tensor:
        with within(f"{self.path}: {weight.name} is no valid {self.format}"):
            value = self.reader.read(weight)
        module = target_of(weight.name, tuple(value.shape), value.dtype, self.files.model_type)
        conv1d = module is not None and module.kind == "linear" and module.transposed
        return value.t() if conv1d else value

    def _zero_biases(self) -> dict[str, str]:
        """Biases of zeros that are not in the model -> reason, for libraries that write a bias for every layer."""
        if not self.reader.writes_zero_biases:
            return {}
        biases = (f"{weight.name.removesuffix('weight')}bias" for weight in self.weights)
        there = [name for name in biases if name in self.files.stored]
        zero = [name for name, value in self.files.read(there) if not bool(value.any())]
        if not zero:
            return {}
        try:
            shape_of = shapes_of(self.files.config, len(self.files.stored))
        except BitportError:  # unknown, so they are kept
            return {}
        reason = "biases of zeros that the model does not have; AutoGPTQ writes them for every layer"
        return {name: reason for name in zero if shape_of(name) is None}

    def _check_others(self) -> None:
        """CheckpointError unless all tensors that belong to no weight can be the model's: next to a quantized weight,
        only a bias in floats."""
        parts = (part for weight in self.weights for part in (weight.name, *weight.parts.values()))
        quantized = {part.removesuffix(".weight") for part in parts if part.endswith(".weight")}
        for name in self.files.stored.keys() - self.rest - self.first.keys():
            module, _, last = name.rpartition(".")
            held = self.files.stored[name]
            if last == "weight" and held.dtype.itemsize == 1:
                raise CheckpointError(f"{self.path}: {name} is {held.dtype}, and nothing says what its numbers mean")
            if module in quantized and not (last.endswith("bias") and held.dtype in WEIGHT_DTYPES):
                raise CheckpointError(
                    f"{self.path}: {name}, {held.dtype}, lies beside a quantized weight, and is none of the parts of "
                    f"{self.format} that are read: numbers may be wrong. Quantize the original model: bitport quantize"
                )

    def _dtype(self) -> torch.dtype:
        """The dtype that the model computes in, from config.json, or, if that names none that bitport supports, from
        its tensors."""
        config = self.files.config
        for part in (config, config.get("text_config")):
            for key in ("dtype", "torch_dtype"):
                said = part.get(key) if isinstance(part, dict) else None
                if isinstance(said, str) and DTYPES.get(said) in FLOATS:
                    return DTYPES[said]
        halves = (torch.bfloat16, torch.float16)
        return next((held.dtype for held in self.files.stored.values() if held.dtype in halves), torch.float32)


class Own:
    """A checkpoint of bitport in the directory ``path``."""

    format = "bitport"

    def __init__(self, path: Path) -> None:
        self.path, self.manifest = path, read_manifest(path)
        check_others(path)
        self.tied, self.nbytes = dict(self.manifest.tied), self.manifest.nbytes
        self.notes: list[str] = []
        self.stored = {name: entry for name, entry in self.manifest.tensors.items() if entry.buffer != "derived"}

    def names(self) -> list[str]:
        return list(self.stored)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        with Shards(self.path, self.manifest, verify=True) as shards:
            for name, entry in self.stored.items():
                yield name, read_plain(shards, self.path, entry)

    def described(self) -> Iterator[Described]:
        blocks = expert_blocks(self.names())
        for name, entry in self.stored.items():
            if entry.scheme is not None:
                yield _described(name, entry, entry.parts, blocks)

    def others(self, quantization: dict[str, Any]) -> Iterator[tuple[Path, str | Path]]:
        return carried(self.path, quantization)


def source_of(path: Path, config: Path | None = None) -> Readable:
    """The source at ``path``. ``config``: as for :func:`bitport.interop.convert`."""
    ours = (path / MANIFEST).is_file()
    model = None if ours else gguf.model_at(path)
    if config is not None:
        if model is not None:
            return gguf.Diffusion(model, config)
        if path.suffix == comfy.SUFFIX:
            return comfy.Comfy(path, config)
        raise ArgumentError(
            f"--config is for diffusion models in GGUF, or as ComfyUI has them in one {comfy.SUFFIX} file, which have "
            f"none; {path} is not one: leave it out"
        )
    if ours:
        return Own(path)
    return Foreign(path) if model is None else gguf.Gguf(model)


def method_of(path: Path) -> str | None:
    """The quantization method that a directory declares; None if it declares none, or is not a directory bitport can
    read."""
    try:
        said = Source(path, quantized=True).quantization
    except CheckpointError:
        return None
    return None if said is None else str(said.get("quant_method"))


def description(name: str, q: QTensor, blocks: Collection[str] | None = None) -> Described:
    """``blocks``: as for :func:`kind_of`."""
    return _described(name, q, q.__tensor_flatten__()[0], blocks)


def upright(q: QTensor) -> QTensor:
    """``q`` as other libraries store it: a Conv1D of transformers is [K, N] in the model, but [N, K] in their files."""
    view = q.t() if q.transposed and q.dim() == 2 else q
    assert isinstance(view, QTensor)
    return view


def _described(name: str, q: QTensor | Entry, parts: Iterable[str], blocks: Collection[str] | None) -> Described:
    """``parts``: the names of those of ``q``. A Conv1D is described as other libraries store it (:func:`upright`)."""
    assert q.scheme is not None
    conv1d = q.transposed and len(q.shape) == 2
    shape = tuple(q.shape)[::-1] if conv1d else tuple(q.shape)
    kind, transposed = kind_of(name, shape, blocks), q.transposed and not conv1d
    return Described(name, q.scheme, shape, kind, transposed, frozenset(parts), conv1d)
