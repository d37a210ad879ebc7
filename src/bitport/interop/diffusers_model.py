"""A diffusers model without data, built from its config.json, and the mapping by which diffusers builds it from a
"single file", where tensors have the names given by the authors of the model, as in ComfyUI."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from bitport.checkpoint.manifest import DIFFUSERS_INDEX, SAID
from bitport.checkpoint.parse import json_object
from bitport.checkpoint.quantized_by import QUANTIZATION
from bitport.checkpoint.side_files import COMPONENT, POINTER
from bitport.checkpoint.source import FETCH, PIPELINE
from bitport.errors import CheckpointError, counted, shortened
from bitport.interop.skeleton import FACTOR, SPARE, Bounded, check_layers
from bitport.interop.tracing import TracedTensor, traced
from bitport.nn.targets import known_weight
from bitport.optional import UNREADABLE, optional

PREFIX = "model.diffusion_model."
"""The prefix of names in files with several models of a pipeline, and in some others: if any name has it, all tensors
without it belong to other models."""


class Component:
    """``path``: a config.json, or the directory that holds it. ``tensors``: number of tensors in the file of the
    model."""

    def __init__(self, path: Path, tensors: int) -> None:
        file = _config_file(path)
        self.said = {key: value for key, value in json_object(file).items() if key not in QUANTIZATION}
        self.name = self.said.get(COMPONENT)
        if not isinstance(self.name, str):
            raise CheckpointError(
                f"{file} does not name a class of diffusers ({COMPONENT}): give the config.json of the model in the "
                f"form of diffusers, as it lies in the folder transformer or unet of its pipeline"
            )
        found = class_of(file, self.name)
        self.mapping = _mapping(found, file)
        check_layers(self.said, tensors)
        try:
            with torch.device("meta"), Bounded(FACTOR * tensors + SPARE):
                self.model = found.from_config(self.said)
        except CheckpointError:
            raise
        except UNREADABLE as error:
            raise CheckpointError(f"{file} describes no {self.name} that diffusers can make: {_told(error)}") from error
        self.shapes = {name: tuple(value.shape) for name, value in self.model.state_dict().items()}
        self.quantizable = {
            f"{name}.{parameter}"
            for name, module in self.model.named_modules(remove_duplicate=False)
            for parameter in module._parameters
            if known_weight(module, parameter)
        }

    def made_of(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TracedTensor]:
        """The tensors of the model, in its order. ``shapes``: of the tensors in the file."""
        marked = [name for name in shapes if name.startswith(PREFIX)]
        keys = {name.removeprefix(PREFIX): name for name in marked or shapes}
        try:
            made = self._mapped(keys, shapes)
        except CheckpointError:
            made = {}
        made = made or self._mapped({PREFIX + key: name for key, name in keys.items()}, shapes)
        ignored = self.model._keys_to_ignore_on_load_unexpected or ()
        unused = {name for name in made.keys() - self.shapes.keys() if any(re.search(each, name) for each in ignored)}
        self._check({name: each for name, each in made.items() if name not in unused})
        return {name: made[name] for name in self.shapes}

    def files(self, quantization: dict[str, Any]) -> Iterator[tuple[Path, str | Path]]:
        """See :meth:`bitport.interop.sources.Readable.others`."""
        yield Path("config.json"), json.dumps({**self.said, **quantization}, indent=2) + "\n"
        if quantization == {"quantization_config": SAID}:
            yield Path(DIFFUSERS_INDEX), POINTER

    def _mapped(self, keys: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TracedTensor]:
        """``keys``: tensor names as passed to diffusers -> names in the file."""

        def function(tensors: dict[str, Any]) -> Any:
            if keys.keys() == self.shapes.keys():
                return tensors
            return self.mapping(config=dict(self.model.config), checkpoint=tensors)

        told = {key: shapes[name] for key, name in keys.items()}
        try:
            made = traced(function, told)
        except UNREADABLE as error:
            raise CheckpointError(
                f"its tensors are not those of a {self.name} as diffusers knows them ({_told(error)}): is the "
                f"configuration that of another model?"
            ) from error
        traceable = all(each.runs is not None for each in made.values())
        used = {run.name for each in made.values() for run in each.runs or ()}
        left = {key: shape for key, shape in told.items() if key not in used}
        if traceable and (twice := sorted(_alone(function, left).keys() & made.keys())):
            lost = shortened([keys[key] for key in left], 3)
            raise CheckpointError(
                f"of its tensors {lost} and another become {twice[0]} in diffusers: take another file"
            )
        return {name: _renamed(each, keys) for name, each in made.items()}

    def _check(self, found: Mapping[str, TracedTensor]) -> None:
        other = [
            f"{name} (file {[*each.shape]}, model {[*self.shapes[name]]})"
            for name, each in found.items()
            if name in self.shapes and _inner(each.shape) != _inner(self.shapes[name])
        ]
        wrong = {
            "missing in it": sorted(self.shapes.keys() - found.keys()),
            "unknown to the model": sorted(found.keys() - self.shapes.keys()),
            "of another shape": sorted(other),
        }
        if told := counted(wrong, 3):
            raise CheckpointError(f"it does not fit the {self.name} of the configuration. {told}")
        if computed := [name for name, each in found.items() if each.runs is None]:
            raise CheckpointError(
                f"diffusers computes {shortened(computed, 3)} from its numbers, or takes columns of them; only whole "
                "rows can be carried over. Quantize the model in the form of diffusers: bitport quantize"
            )


def class_of(root: Path, name: str) -> Any:
    """The diffusers model class ``name``, as given in the config.json in ``root``."""
    diffusers = optional("diffusers", "diffusers", f"{root} is a {name} of")
    found: Any = getattr(diffusers, name, None)
    if not (isinstance(found, type) and issubclass(found, diffusers.ModelMixin)):
        raise CheckpointError(f"{root} is a {name}, which diffusers {diffusers.__version__} does not have: upgrade it")
    return found


def unused_notes(names: Iterable[str], made: Mapping[str, TracedTensor]) -> Iterator[str]:
    """``names``: of the tensors in a file; ``made``: the tensors of the model made of them."""
    used = {run.name for each in made.values() for run in each.runs or ()}
    if left := [name for name in names if name not in used]:
        yield f"left out: {shortened(left, 3)}, which the model of diffusers does not have"


def _config_file(path: Path) -> Path:
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; {FETCH}")
    if not path.is_dir():
        return path
    if (path / PIPELINE).is_file():
        parts = sorted(str(each.parent) for each in path.glob("*/config.json"))
        raise CheckpointError(f"{path} is a pipeline of diffusers; give one of its models: {shortened(parts)}")
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path} has no config.json; {FETCH}")
    return path / "config.json"


def _mapping(found: Any, file: Path) -> Callable[..., Any]:
    table = importlib.import_module("diffusers.loaders.single_file_model").SINGLE_FILE_LOADABLE_CLASSES
    name = next((each.__name__ for each in found.__mro__ if each.__name__ in table), None)
    if name is None:
        raise CheckpointError(
            f"{file} is a {found.__name__}, which diffusers reads from no single file; it does {', '.join(table)}"
        )
    function: Callable[..., Any] = table[name]["checkpoint_mapping_fn"]
    return function


def _renamed(made: TracedTensor, names: Mapping[str, str]) -> TracedTensor:
    runs = None if made.runs is None else tuple(run._replace(name=names[run.name]) for run in made.runs)
    return made._replace(runs=runs)


def _alone(function: Callable[..., Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TracedTensor]:
    """What is made of the tensors left over, to find those that others replaced. Functions that access all tensors of a
    model by name fail, and then nothing was replaced."""
    try:
        return traced(function, shapes) if shapes else {}
    except UNREADABLE:
        return {}


def _inner(shape: tuple[int, ...]) -> list[int]:
    """The shape without dimensions of 1, some of which ggml omits."""
    return [size for size in shape if size != 1]


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
