"""Third-party safetensors files as a stream of named tensors: a single file, or a Hugging Face directory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitport.arguments import path_of
from bitport.checkpoint.arranged import Arranged, Arrangement
from bitport.checkpoint.dtypes import name_of
from bitport.checkpoint.manifest import DIFFUSERS_INDEX, FOLDER, NAME, SAID, Entry, Manifest, Part
from bitport.checkpoint.names import targets_of
from bitport.checkpoint.safetensors_reader import SafetensorsReader
from bitport.checkpoint.shards import inside
from bitport.errors import ArgumentError, CheckpointError, shortened
from bitport.nn.targets import find_targets
from bitport.schemes import Target

INDEX = "model.safetensors.index.json"
INDEXES = (INDEX, DIFFUSERS_INDEX)
COMPONENT = "_class_name"
"""The key that names a diffusers class in config.json, and its pipeline in model_index.json."""
PIPELINE = "model_index.json"
POINTER = json.dumps({"metadata": {}, "weight_map": {NAME: NAME}}) + "\n"
"""The index that diffusers finds in a bitport directory."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
WEIGHTS = (*PICKLES, ".safetensors", ".gguf", ".onnx", ".h5", ".msgpack", ".tflite", ".npz", ".index.json")
"""Suffixes of files that hold or list weights; all other files are copied."""
QUANTIZATION = ("quantization_config", "compression_config")
"""Keys of config.json that describe how weights are quantized."""
QUANTIZATION_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
    "quanto_qmap.json": "quanto",
    "quantization_map.json": "quanto",
}
"""Files that, in some checkpoints, are the only description of the quantization -> its method."""
QUANTIZED = {".W_q": "hqq"}
"""Suffixes of tensor names that may be the only sign of a library's quantization -> its method."""
MLX = "quantization"
"""The key of config.json for MLX, which names no method."""
TOKEN_EMBEDDING = re.compile(r"(.*\.)?(embed_tokens|wte|tok_embeddings|word_embeddings|embed_in|shared)\.weight")
HEAD = "lm_head.weight"
FETCH = "download a model of the hub with: hf download NAME --local-dir DIR"
GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


@dataclasses.dataclass(frozen=True)
class Held:
    """A tensor as described by the header of its file."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Made(Held):
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
        found: dict[str, dict[str, Held]] = {}
        for file in self._files():
            with SafetensorsReader(file) as reader:
                for held in _held(reader):
                    found.setdefault(held.name, {})[file.name] = held
                self.metadata |= reader.metadata
        self.tensors = {name: self._one(name, held) for name, held in found.items()}
        self.files = sorted({held.file for held in self.tensors.values()})
        if arrangement is not None:
            self.tensors = _arranged(self.tensors, arrangement)
        self.quantization = self._quantization()
        if self.quantization is not None and not quantized:
            raise CheckpointError(
                f"{self.path} is quantized already ({self.quantization.get('quant_method')}); give the original model, "
                "or convert this one as it is: bitport convert"
            )

    @functools.cached_property
    def stored(self) -> dict[str, Held]:
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

    def _targets(self, tensors: dict[str, Held]) -> list[Target]:
        looks = {name: (held.shape, held.dtype) for name, held in tensors.items()}
        found = targets_of(looks, self.model_type)
        return [dataclasses.replace(target, **self.told.get(target.name, {})) for target in found]

    def ask(self, model: nn.Module | None, arrangement: Arrangement | None = None) -> None:
        """Let the modules of ``model`` determine what the weights are, since they know more than names: an embedding
        with an unusual name, one that rewrites its rows, a transposed convolution. Tensors that the model lacks, or
        splits, are still judged by name. ``arrangement``: as for the files."""
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
                self.told[source] = {"kind": its.kind, "transposed": transposed, "unfit": its.unfit}

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors one at a time, file by file."""
        for _, group in itertools.groupby(map(self.tensors.__getitem__, names), key=lambda held: held.file):
            yield from self._read(group)

    def _read(self, group: Iterable[Held]) -> Iterator[tuple[str, Tensor]]:
        """Open each file once, including those of further pieces."""
        with contextlib.ExitStack() as stack:

            @functools.cache
            def opened(file: Path) -> SafetensorsReader:
                return stack.enter_context(SafetensorsReader(file))

            def piece(entry: Entry) -> Tensor:
                return opened(self.path / entry.shard if self.is_directory else self.path).read(entry.name)

            for held in group:
                yield held.name, held.entry.made(piece) if isinstance(held, Made) else opened(held.file).read(held.name)

    def check_apart(self, directory: Path) -> None:
        """ArgumentError if ``directory`` is inside the source, which is read-only, or is a file."""
        if directory.exists() and not directory.is_dir():
            raise ArgumentError(f"{directory} is a file; give a directory")
        if self.is_directory and directory.resolve().is_relative_to(self.path.resolve()):
            raise ArgumentError(
                f"{directory} lies in the source {self.path}; choose another directory for the checkpoint"
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
        files = [self.path / file for file in sorted(set(weight_map.values()))]
        for file in files:
            if file.parent != self.path or not file.is_file():
                raise CheckpointError(f"{path} names {file.name!r}, which is not in {self.path}; fetch it")
            inside(self.path, file.name)
        held: set[str] = set()
        for file in files:
            with SafetensorsReader(file) as reader:
                held |= reader.tensors.keys()
        if lost := sorted(set(weight_map) - held):
            raise CheckpointError(f"{len(lost)} tensors of {path} are in no file: {shortened(lost)}")
        self.weight_map = weight_map
        return files

    def _one(self, name: str, held: dict[str, Held]) -> Held:
        """Select among the files that hold a tensor; ``held``: by file."""
        if len(held) == 1:
            return next(iter(held.values()))
        if (said := self.weight_map.get(name)) not in held:
            raise CheckpointError(
                f"{name} is in {' and in '.join(held)} of {self.path}, and 'weight_map' of its index names "
                f"{said or 'no file'} for it: make it name the right one"
            )
        return held[said]

    def _quantization(self) -> dict[str, Any] | None:
        """How the weights are quantized, according to config.json, the separate file of older libraries, or else the
        names of tensors."""
        parts = (self.config, *self.config.values())  # text_config, vision_config ..
        mlx = self.config.get(MLX)
        found = [part[key] for key in QUANTIZATION for part in parts if _has(part, key)]
        if isinstance(mlx, dict) and not any(_has(said, "quant_method") for said in found):
            return {"quant_method": "mlx", **mlx}
        if found:
            said = found[0] if isinstance(found[0], dict) else {}
            return said if _has(said, "quant_method") else {**said, "quant_method": _method_of(said)}
        for name, method in QUANTIZATION_FILES.items():
            if self.is_directory and (self.path / name).is_file():
                return {"quant_method": method, **json_object(self.path / name)}
        ends = {method for end, method in QUANTIZED.items() for name in self.tensors if name.endswith(end)}
        return {"quant_method": ends.pop()} if ends else None

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
        both = []
        for name in names:
            with SafetensorsReader(self.tensors[name].file) as reader:
                both.append(reader.read(name))
        return both[0].dtype == both[1].dtype and torch.equal(*both)


def _method_of(said: dict[str, Any]) -> str | None:
    """The method of settings that do not name it, as in some older versions."""
    producer = said.get("producer")
    if isinstance(producer, dict) and producer.get("name") == "modelopt":
        return "modelopt"
    return "bitsandbytes" if said.get("load_in_4bit") or said.get("load_in_8bit") else None


def _has(part: Any, key: str) -> bool:
    return isinstance(part, dict) and part.get(key) is not None


def others(path: Path) -> Iterator[Path]:
    """The files in the directory ``path`` that hold no weights, relative to it: configuration, tokenizer, licence."""
    for file in sorted(path.rglob("*")) if path.is_dir() else ():
        relative = file.relative_to(path)
        hidden = any(part.startswith(".") for part in relative.parts)
        left = hidden or relative.parts[0] == FOLDER or file.name.endswith(WEIGHTS)
        if file.is_file() and not left:
            yield relative


def check_others(path: Path) -> None:
    """Check early: CheckpointError if one of these files is a link that is not followed, and a warning if something is
    left out because of its name."""
    for relative in others(path):
        inside(path, str(relative))
    if path.is_dir() and (path / FOLDER).is_dir():
        warnings.warn(f"{path / FOLDER} is not carried over: bitport keeps unfinished work there", stacklevel=3)


def carried(
    path: Path, quantization: dict[str, Any], dtype: torch.dtype | None = None
) -> Iterator[tuple[Path, str | Path]]:
    """Yield (name, text or file) for what ``path`` holds besides weights. Only config.json changes: the keys of
    ``quantization`` describe how weights are quantized, and ``dtype`` what floats were cast to."""
    for relative in others(path):
        file = path / relative
        if file.name != NAME and str(relative) not in QUANTIZATION_FILES:
            yield relative, _config(file, quantization, dtype) if str(relative) == "config.json" else file
    if quantization == {"quantization_config": SAID} and class_name(path):
        yield Path(DIFFUSERS_INDEX), POINTER


def class_name(path: Path) -> str | None:
    """The diffusers class of the model in the directory ``path``, or None if config.json names none."""
    found = json_object(path / "config.json").get(COMPONENT) if (path / "config.json").is_file() else None
    return found if isinstance(found, str) else None


def _config(file: Path, quantization: dict[str, Any], dtype: torch.dtype | None) -> str:
    said = _without(json_object(file))
    for key, part in said.items():
        if isinstance(part, dict):
            said[key] = _without(part)
    said |= quantization
    if dtype is not None and COMPONENT not in said:
        said = {key: value for key, value in said.items() if key != "torch_dtype"} | {"dtype": name_of(dtype)}
    return json.dumps(said, indent=2) + "\n"


def _without(said: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in said.items() if key not in (*QUANTIZATION, MLX)}


def json_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds {type(found).__name__}, not an object")
    return found


def _arranged(tensors: dict[str, Held], arrangement: Arrangement) -> dict[str, Held]:
    entries = {
        held.name: Entry(held.name, held.file.name, held.dtype, held.shape, {"": Part(held.dtype, held.shape, 0)})
        for held in tensors.values()
    }
    found: dict[str, Held] = {}
    for name, entry in arrangement(Manifest(entries, {}, {}, "")).tensors.items():
        if isinstance(entry, Arranged):
            found[name] = Made(name, tensors[entry.pieces[0][0].name].file, entry.shape, entry.dtype, entry)
        else:
            found[name] = tensors[name]
    return found


def _held(reader: SafetensorsReader) -> list[Held]:
    """The tensors of a file in the order of their data."""
    return [Held(name, reader.path, span.shape, span.dtype) for name, span in reader.tensors.items()]


def _about_pickles(paths: list[Path]) -> str:
    if not any(path.suffix in PICKLES for path in paths):
        return "Give a Hugging Face directory or a .safetensors file"
    return (
        f"{shortened(path.name for path in paths)} is a pickle, which can run any code when it is read, so bitport "
        "does not read it. Convert it with safetensors first (transformers: save_pretrained)"
    )
