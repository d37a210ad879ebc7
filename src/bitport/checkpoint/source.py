"""Third-party safetensors files as a stream of named tensors: a single file, or a Hugging Face directory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitport.arguments import path_of
from bitport.checkpoint.arranged import Arranged, Arrangement
from bitport.checkpoint.manifest import DIFFUSERS_INDEX, NAME, SAID, Entry, Manifest, Part
from bitport.checkpoint.names import targets_of
from bitport.checkpoint.parse import json_object
from bitport.checkpoint.quantized_by import quantized_by
from bitport.checkpoint.safetensors_reader import SafetensorsReader
from bitport.checkpoint.shards import inside
from bitport.checkpoint.side_files import PICKLES, carried, check_others
from bitport.errors import ArgumentError, CheckpointError, shortened
from bitport.nn.targets import find_targets
from bitport.schemes import Target

INDEX = "model.safetensors.index.json"
INDEXES = (INDEX, DIFFUSERS_INDEX)
PIPELINE = "model_index.json"
TOKEN_EMBEDDING = re.compile(r"(.*\.)?(embed_tokens|wte|tok_embeddings|word_embeddings|embed_in|shared)\.weight")
HEAD = "lm_head.weight"
FETCH = "download a model of the hub with: hf download NAME --local-dir DIR"
GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


@dataclasses.dataclass(frozen=True)
class FileTensor:
    """A tensor as described by the header of its file."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class ArrangedTensor(FileTensor):
    """A tensor of the model that is split or named differently in the files; ``file``: that of the first piece."""

    entry: Arranged


class Source:
    """``path``: a .safetensors file, or a directory of them along with other files that a model needs. ``quantized``:
    accept a model quantized by other tools, whose description is then in ``quantization``. ``arrangement``: maps the
    tensors to the names and splits of a model."""

    def __init__(self, path: str | Path, *, quantized: bool = False, arrangement: Arrangement | None = None) -> None:
        self.path = path_of(path, "source")
        self.is_directory = self.path.is_dir()
        if not self.path.exists():
            raise CheckpointError(f"{self.path} does not exist; {FETCH}")
        check_others(self.path)
        self.config = json_object(self.path / "config.json") if (self.path / "config.json").is_file() else {}
        self.weight_map: dict[str, str] = {}
        """Tensor name -> file name, if there is an index."""
        self.told: dict[str, dict[str, Any]] = {}
        """Fields of targets by tensor name, as far as a model was asked."""
        self.metadata: dict[str, str] = {}
        """Metadata from the headers of all files."""
        found: dict[str, dict[str, FileTensor]] = {}
        for file in self._files():
            with SafetensorsReader(file) as reader:
                for name, span in reader.tensors.items():
                    found.setdefault(name, {})[file.name] = FileTensor(name, file, span.shape, span.dtype)
                self.metadata |= reader.metadata
        if lost := sorted(self.weight_map.keys() - found.keys()):
            raise CheckpointError(f"{len(lost)} tensors of the index in {self.path} are in no file: {shortened(lost)}")
        self.tensors = {name: self._one(name, held) for name, held in found.items()}
        self.files = sorted({held.file for held in self.tensors.values()})
        if arrangement is not None:
            self.tensors = _arranged(self.tensors, arrangement)
        self.quantization = quantized_by(self.path, self.config, self.tensors)
        if self.quantization is not None and not quantized:
            raise CheckpointError(
                f"{self.path} is quantized already ({self.quantization.get('quant_method')}); give the original model, "
                "or convert this one as it is: bitport convert"
            )

    @functools.cached_property
    def stored(self) -> dict[str, FileTensor]:
        """The tensors that are not aliases of others."""
        return {name: held for name, held in self.tensors.items() if name not in self.tied}

    @property
    def model_type(self) -> str:
        found = self.config.get("model_type", "")
        return found if isinstance(found, str) else ""

    def targets(self) -> list[Target]:
        """What a recipe may quantize, including tied heads, in the order of the files."""
        targets = self._targets(self.tensors)
        for alias, name in self.tied.items():
            if head := self._targets({alias: self.tensors[name]}):
                targets = [target for target in targets if target.name != alias]
                targets.append(dataclasses.replace(head[0], storage=name))
        return targets

    def _targets(self, tensors: dict[str, FileTensor]) -> list[Target]:
        looks = {name: (held.shape, held.dtype) for name, held in tensors.items()}
        found = targets_of(looks, self.model_type)
        return [dataclasses.replace(target, **self.told.get(target.name, {})) for target in found]

    def ask(self, model: nn.Module | None, arrangement: Arrangement | None = None) -> None:
        """Let the modules of ``model`` determine what the weights are, since they know more than names: an embedding
        with an unusual name, one that rewrites its rows, a class that reads its weight itself. Tensors that the model
        lacks, or splits, are still judged by name. ``arrangement``: as for the files."""
        if model is None:
            if arrangement is not None:
                raise ArgumentError("an arrangement is that of a model: give model= too")
            return
        held = self.tensors if arrangement is None else _arranged(self.tensors, arrangement)
        modules = {target.name: target for target in find_targets(model)}
        for name in held.keys() & model.state_dict().keys():
            entry = getattr(held[name], "entry", None)
            source = name if entry is None else entry.source
            if source is not None:
                its = modules.get(name, Target("", "", "other", (), ""))
                transposed = its.transposed != (entry is not None and entry.flipped)
                self.told[source] = {"kind": its.kind, "transposed": transposed, "unfit": its.unfit, "note": its.note}

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors one at a time, file by file."""
        for _, group in itertools.groupby(map(self.tensors.__getitem__, names), key=lambda held: held.file):
            yield from self._read(group)

    def _read(self, group: Iterable[FileTensor]) -> Iterator[tuple[str, Tensor]]:
        """Open each file once, including those of further pieces."""
        with contextlib.ExitStack() as stack:

            @functools.cache
            def opened(file: Path) -> SafetensorsReader:
                return stack.enter_context(SafetensorsReader(file))

            def piece(entry: Entry) -> Tensor:
                return opened(self.path / entry.shard if self.is_directory else self.path).read(entry.name)

            for held in group:
                yield (
                    held.name,
                    held.entry.made(piece) if isinstance(held, ArrangedTensor) else opened(held.file).read(held.name),
                )

    def others(self, dtype: torch.dtype | None) -> Iterator[tuple[Path, str | Path]]:
        """The other files that a checkpoint of these tensors, cast to ``dtype``, includes."""
        return carried(self.path, {"quantization_config": SAID}, dtype)

    def _files(self) -> list[Path]:
        if not self.is_directory:
            if self.path.suffix != ".safetensors":
                raise CheckpointError(f"{self.path} is not a .safetensors file. {_about_pickles([self.path])}")
            return [self.path]
        if (self.path / NAME).exists():
            raise CheckpointError(f"{self.path} is a bitport checkpoint already; give the original model")
        for name in INDEXES:
            if (self.path / name).is_file():
                inside(self.path, name)
                return self._indexed(self.path / name)
        files = sorted(self.path.glob("*.safetensors"))
        for name in INDEXES:
            if (whole := self.path / name.removesuffix(".index.json")) in files:
                files = [whole]
        if len(files) == 1:
            inside(self.path, files[0].name)
            return files
        if files:
            raise CheckpointError(
                f"{self.path} has {len(files)} .safetensors files and no {INDEX}; fetch it, or give one of them"
            )
        if (self.path / PIPELINE).is_file():
            parts = sorted(path.parent.name for path in self.path.glob("*/config.json"))
            raise CheckpointError(
                f"{self.path} is a pipeline of diffusers; give one of its models: "
                f"{shortened(str(self.path / part) for part in parts)}"
            )
        pickles = [path for path in sorted(self.path.iterdir()) if path.suffix in PICKLES]
        raise CheckpointError(f"{self.path} has no .safetensors file. {_about_pickles(pickles)}")

    def _indexed(self, path: Path) -> list[Path]:
        weight_map = json_object(path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{path} has no 'weight_map' of names to files; fetch it again")
        there = {file.name for file in self.path.iterdir() if file.is_file()}
        names = sorted({str(Path(file)) for file in weight_map.values()})
        for name in names:
            if name not in there:
                raise CheckpointError(f"{path} names {name[:200]!r}, which is not in {self.path}; fetch it")
            inside(self.path, name)
        self.weight_map = weight_map
        return [self.path / name for name in names]

    def _one(self, name: str, held: dict[str, FileTensor]) -> FileTensor:
        """Select among the files that hold a tensor; ``held``: by file."""
        if len(held) == 1:
            return next(iter(held.values()))
        if (said := self.weight_map.get(name)) not in held:
            raise CheckpointError(
                f"{name} is in {' and in '.join(held)} of {self.path}, and 'weight_map' of its index names "
                f"{said or 'no file'} for it: make it name the right one"
            )
        return held[said]

    @functools.cached_property
    def tied(self) -> dict[str, str]:
        """The head that shares the token embedding: {its name: the embedding's}. Only if config.json says so, and the
        file either lacks the head or holds the same numbers twice. (Ties made by the model itself need no entry: load()
        follows them.)"""
        text = self.config.get("text_config")
        inner = text.get("tie_word_embeddings") if isinstance(text, dict) else None
        says = self.config.get("tie_word_embeddings", inner)
        generates = str(self.config.get("architectures", "")).strip("[]'").endswith(GENERATING)
        tokens = [name for name in self.tensors if TOKEN_EMBEDDING.fullmatch(name)]
        if says is not True or not generates or len(tokens) != 1:
            return {}
        return {HEAD: tokens[0]} if HEAD not in self.tensors or self._equal(HEAD, tokens[0]) else {}

    def _equal(self, *names: str) -> bool:
        one, other = (value for _, value in self.read(names))
        return one.dtype == other.dtype and torch.equal(one, other)


def cast_floats(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """``tensor`` in ``dtype`` if it holds floats; None: as it is."""
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def check_apart(source: Path, directory: Path) -> None:
    """ArgumentError if a checkpoint of ``source`` cannot be written to ``directory``, because it is a file, or lies in
    the source, or holds it: then it would hold two models."""
    if directory.exists() and not directory.is_dir():
        raise ArgumentError(f"{directory} is a file; give a directory")
    there = directory.resolve()
    holds = source.is_file() and there == source.parent.resolve()  # though the file may be a link to another directory
    if holds or there.is_relative_to(source.resolve()):
        how = "holds" if holds else "lies in"
        raise ArgumentError(f"{directory} {how} the source {source}; choose another directory for the checkpoint")


def _arranged(tensors: dict[str, FileTensor], arrangement: Arrangement) -> dict[str, FileTensor]:
    entries = {
        held.name: Entry(held.name, held.file.name, held.dtype, held.shape, {"": Part(held.dtype, held.shape, 0)})
        for held in tensors.values()
    }
    found: dict[str, FileTensor] = {}
    for name, entry in arrangement(Manifest(entries, {}, {}, "")).tensors.items():
        if isinstance(entry, Arranged):
            found[name] = ArrangedTensor(name, tensors[entry.pieces[0][0].name].file, entry.shape, entry.dtype, entry)
        else:
            found[name] = tensors[name]
    return found


def _about_pickles(paths: list[Path]) -> str:
    if not any(path.suffix in PICKLES for path in paths):
        return "Give a Hugging Face directory or a .safetensors file"
    return (
        f"{shortened(path.name for path in paths)} is a pickle, which can run any code when it is read, so bitport "
        "does not read it. Convert it with safetensors first (transformers: save_pretrained)"
    )
