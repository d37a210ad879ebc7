"""The files beside the weights of a model that a checkpoint made of it includes."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bitport.checkpoint.dtypes import name_of
from bitport.checkpoint.manifest import DIFFUSERS_INDEX, FOLDER, NAME, SAID
from bitport.checkpoint.parse import json_object, parsed_file
from bitport.checkpoint.quantized_by import MLX, QUANTIZATION, QUANTIZATION_FILES
from bitport.checkpoint.shards import inside
from bitport.errors import shortened

COMPONENT = "_class_name"
"""The key that names a diffusers class in config.json, and its pipeline in model_index.json."""
POINTER = json.dumps({"metadata": {}, "weight_map": {NAME: NAME}}) + "\n"
"""The index that diffusers finds in a bitport directory."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
WEIGHT_SUFFIXES = (*PICKLES, ".safetensors", ".gguf", ".onnx", ".h5", ".msgpack", ".tflite", ".npz", ".index.json")
"""Suffixes of files that hold or list weights; all other files are copied."""
MODULES = "modules.json"
"""The list of sentence-transformers: a model is followed by modules in folders of their own, such as a last layer."""
OF_A_MODULE = ("model.safetensors", "pytorch_model.bin")
"""The weights of such a module: the first of these files. They are few, and copied."""


def others(path: Path) -> Iterator[Path]:
    """The files in the directory ``path`` beside the weights of the model, relative to it: configuration, tokenizer,
    licence."""
    following = _following(path)
    for relative in _files(path):
        kept = relative.parent in following and _is_first(path / relative)
        if kept or not relative.name.endswith(WEIGHT_SUFFIXES):
            yield relative


def _files(path: Path) -> Iterator[Path]:
    for file in sorted(path.rglob("*")) if path.is_dir() else ():
        relative = file.relative_to(path)
        hidden = any(part.startswith(".") for part in relative.parts)
        if file.is_file() and not hidden and relative.parts[0] != FOLDER:
            yield relative


def _following(path: Path) -> set[Path]:
    """The folders of the modules that follow the model."""
    listed = parsed_file(path / MODULES) if (path / MODULES).is_file() else []
    named = [each.get("path") for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    return {Path(folder) for folder in named if isinstance(folder, str)} - {Path()}


def _is_first(file: Path) -> bool:
    there = [name for name in OF_A_MODULE if file.with_name(name).is_file()]
    return file.name in there[:1]


def check_others(path: Path) -> None:
    """Check early: CheckpointError if one of these files is a link that is not followed, and a warning if something is
    left out that the model may need."""
    found = list(others(path))
    for relative in found:
        inside(path, str(relative))
    apart = [file for file in _files(path) if file.suffix == ".safetensors" and len(file.parts) > 1]
    if left := [str(file) for file in apart if file not in found]:
        _warn(
            f"not carried over from {path}: {shortened(left)}. Weights in other folders than the model's are not read; "
            "if it needs these, copy them to the result"
        )
    if path.is_dir() and (path / FOLDER).is_dir():
        _warn(f"{path / FOLDER} is not carried over: bitport keeps unfinished work there")


@functools.cache
def _warn(text: str) -> None:
    """Once, although a directory is read several times: Python forgets what it showed when a filter changes."""
    warnings.warn(text, stacklevel=3)


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
