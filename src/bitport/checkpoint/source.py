"""The safetensors files of others, as a stream of named tensors: one file, or a Hugging Face directory."""

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
"""Where config.json names a class of diffusers, and model_index.json of one its pipeline."""
PIPELINE = "model_index.json"
POINTER = json.dumps({"metadata": {}, "weight_map": {NAME: NAME}}) + "\n"
"""The index that diffusers finds in a directory of bitport."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
WEIGHTS = (*PICKLES, ".safetensors", ".gguf", ".onnx", ".h5", ".msgpack", ".tflite", ".npz", ".index.json")
"""What the names of files end with that hold weights or list them; all others are carried over."""
QUANTIZATION = ("quantization_config", "compression_config")
"""Where config.json says how weights are quantized."""
QUANTIZATION_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
    "quanto_qmap.json": "quanto",
    "quantization_map.json": "quanto",
}
"""Files that say it alone in some checkpoints -> by which method."""
QUANTIZED = {".W_q": "hqq"}
"""What names of tensors end with where files of a library may say it nowhere else -> by which method."""
MLX = "quantization"
"""Where config.json says it of MLX, which names no method."""
TOKEN_EMBEDDING = re.compile(r"(.*\.)?(embed_tokens|wte|tok_embeddings|word_embeddings|embed_in|shared)\.weight")
HEAD = "lm_head.weight"
FETCH = "download a model of the hub with: hf download NAME --local-dir DIR"
GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


@dataclasses.dataclass(frozen=True)
class Held:
    """A tensor as its file's header describes it."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Made(Held):
    """A tensor of the model that the files have in pieces or under another name; ``file``: that of the first piece."""

    entry: Arranged


class Source:
    """``path``: a .safetensors file, or a directory of them with whatever else a model needs. ``quantized``: whether it
    may be one that others have quantized; what they say of it is then in ``quantization``. ``arrangement``: of a model
    whose names and pieces the tensors are to have."""

    def __init__(self, path: str | Path, *, quantized: bool = False, arrangement: Arrangement | None = None) -> None:
        self.path = Path(path)
        self.is_directory = self.path.is_dir()
        if not self.path.exists():
            raise CheckpointError(f"{self.path} does not exist; {FETCH}")
        check_others(self.path)
        self.config = json_object(self.path / "config.json") if (self.path / "config.json").is_file() else {}
        self.weight_map: dict[str, str] = {}
        """Name of a tensor -> that of its file, where there is an index."""
        self.told: dict[str, dict[str, Any]] = {}
        """Of tensors by name, fields of the target, as far as a model was asked."""
        self.metadata: dict[str, str] = {}
        """What the headers of all files say beside their tensors."""
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
        """The tensors that are no aliases of others."""
        return {name: held for name, held in self.tensors.items() if name not in self.tied}

    @property
    def model_type(self) -> str:
        found = self.config.get("model_type", "")
        return found if isinstance(found, str) else ""

    def targets(self) -> list[Target]:
        """What a recipe may quantize, tied heads too, in the order of the files."""
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
        """Has the modules of ``model`` say what the weights are, which know more than names: an embedding that is not
        called one, or rewrites its rows, a convolution that is a transposed one. Tensors that the model lacks, or has
        in several pieces, are what their names say. ``arrangement``: as for the files."""
        if model is None:
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
        """One at a time, file by file."""
        for _, group in itertools.groupby(map(self.tensors.__getitem__, names), key=lambda held: held.file):
            yield from self._read(group)

    def _read(self, group: Iterable[Held]) -> Iterator[tuple[str, Tensor]]:
        """Each file is opened once, those of further pieces too."""
        with contextlib.ExitStack() as stack:

            @functools.cache
            def opened(file: Path) -> SafetensorsReader:
                return stack.enter_context(SafetensorsReader(file))

            def piece(entry: Entry) -> Tensor:
                return opened(self.path / entry.shard if self.is_directory else self.path).read(entry.name)

            for held in group:
                yield held.name, held.entry.made(piece) if isinstance(held, Made) else opened(held.file).read(held.name)

    def check_apart(self, directory: Path) -> None:
        """ArgumentError where it lies in the source, which is only read."""
        if self.is_directory and directory.resolve().is_relative_to(self.path.resolve()):
            raise ArgumentError(
                f"{directory} lies in the source {self.path}; choose another directory for the checkpoint"
            )

    def others(self, dtype: torch.dtype | None) -> Iterator[tuple[Path, str | Path]]:
        """What a checkpoint of these tensors, cast to ``dtype``, carries over."""
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
        """``held``: by file."""
        if len(held) == 1:
            return next(iter(held.values()))
        if (said := self.weight_map.get(name)) not in held:
            raise CheckpointError(
                f"{name} is in {' and in '.join(held)} of {self.path}, and 'weight_map' of its index names "
                f"{said or 'no file'} for it: make it name the right one"
            )
        return held[said]

    def _quantization(self) -> dict[str, Any] | None:
        """What config.json, or the file that older libraries wrote beside it, or else the names of tensors say of the
        numbers of the weights."""
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
        """The head that shares the token embedding: {its name: the embedding's}. Only where config.json says so, and
        where the file either lacks the head or holds the same numbers twice. (What a model ties by itself needs no
        mention: load() follows it.)"""
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
    """The method of settings that do not name it, as some older ones."""
    producer = said.get("producer")
    if isinstance(producer, dict) and producer.get("name") == "modelopt":
        return "modelopt"
    return "bitsandbytes" if said.get("load_in_4bit") or said.get("load_in_8bit") else None


def _has(part: Any, key: str) -> bool:
    return isinstance(part, dict) and part.get(key) is not None


def others(path: Path) -> Iterator[Path]:
    """The files of the directory ``path`` that hold no weights, relative to it: configuration, tokenizer, licence."""
    for file in sorted(path.rglob("*")) if path.is_dir() else ():
        relative = file.relative_to(path)
        hidden = any(part.startswith(".") for part in relative.parts)
        left = hidden or relative.parts[0] == FOLDER or file.name.endswith(WEIGHTS)
        if file.is_file() and not left:
            yield relative


def check_others(path: Path) -> None:
    """Before anything is done: CheckpointError where one of them is a link that is not followed, and a warning of what
    stays behind because of its name."""
    for relative in others(path):
        inside(path, str(relative))
    if path.is_dir() and (path / FOLDER).is_dir():
        warnings.warn(f"{path / FOLDER} is not carried over: bitport keeps unfinished work there", stacklevel=3)


def carried(
    path: Path, quantization: dict[str, Any], dtype: torch.dtype | None = None
) -> Iterator[tuple[Path, str | Path]]:
    """Name -> text or file, of what ``path`` holds besides weights. Only config.json changes: it says how weights are
    quantized, by the keys of ``quantization``, and which ``dtype`` floats were cast to."""
    for relative in others(path):
        file = path / relative
        if file.name != NAME and str(relative) not in QUANTIZATION_FILES:
            yield relative, _config(file, quantization, dtype) if str(relative) == "config.json" else file
    if quantization == {"quantization_config": SAID} and class_name(path):
        yield Path(DIFFUSERS_INDEX), POINTER


def class_name(path: Path) -> str | None:
    """The class of the model of diffusers in the directory ``path``, or None where config.json names none."""
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
    """Its tensors in the order of their data."""
    return [Held(name, reader.path, span.shape, span.dtype) for name, span in reader.tensors.items()]


def _about_pickles(paths: list[Path]) -> str:
    if not any(path.suffix in PICKLES for path in paths):
        return "Give a Hugging Face directory or a .safetensors file"
    return (
        f"{shortened(path.name for path in paths)} is a pickle, which can run any code when it is read, so bitport "
        "does not read it. Convert it with safetensors first (transformers: save_pretrained)"
    )
