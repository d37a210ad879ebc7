"""The parameters of a model, from its config.json, for files that do not tell their shapes, or have more than them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bitport.errors import CheckpointError, cut
from bitport.optional import UNREADABLE, optional

LEFT_OUT = ("quantization_config", "compression_config", "auto_map")
"""Keys of config.json to ignore: quantization is read here, and custom code is never run."""
FACTOR, SPARE = 4, 1000
"""Limits on the tensors of a model: at most FACTOR times the tensors in its files, plus SPARE."""
LAYERS = 100
"""How many more layers than tensors a config.json may name: those of small models keep defaults, such as the 28 of
max_window_layers."""

LABELS = 1 << 20
"""The most labels of a classifier, for each of which transformers makes a name."""


class Bounded(TorchFunctionMode):
    """Raise after ``limit`` tensors were created: a config.json may ask for any number of layers."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.left = limit

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= func is torch.empty
        if self.left < 0:
            raise CheckpointError("config.json describes a model of many more weights than its files have")
        return func(*args, **(kwargs or {}))


def shapes_of(config: Mapping[str, Any], tensors: int) -> Callable[[str], tuple[int, ...] | None]:
    """Return a function: name of a tensor in the files -> shape of the parameter that it is, or is part of, in the
    model; None if there is none. The model is of the class that ``config`` names, or a causal language model if
    transformers has no such class. ``tensors``: number of tensors in its files. Nothing is allocated, and no custom
    code is run."""
    transformers = optional(
        "transformers", "hf", "the files do not hold the shapes of their weights; finding them by config.json needs"
    )
    check_layers(config, tensors)
    kept = {key: value for key, value in config.items() if key not in LEFT_OUT}
    bad_config = importlib.import_module("huggingface_hub.errors").StrictDataclassError
    try:
        described = transformers.AutoConfig.for_model(**kept)
        with torch.device("meta"), Bounded(FACTOR * tensors + SPARE):
            if found := class_of(described):
                model = found(described)
            else:
                model = transformers.AutoModelForCausalLM.from_config(described, trust_remote_code=False)
        own = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        rename = renaming(model, own)
    except CheckpointError:
        raise
    except (*UNREADABLE, bad_config) as error:
        raise CheckpointError(
            "the files do not hold the shapes of these weights, and transformers cannot make the model of config.json, "
            f"which has them: {cut(' '.join(str(error).split()))}"
        ) from error
    return lambda name: own[name] if name in own else own.get(rename(name)[0])


def class_of(config: Any) -> Any:
    """The class that a ``config`` of transformers names, or None if transformers has no such model."""
    transformers = importlib.import_module("transformers")
    name = next(iter(config.architectures or ()), "")
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    return found if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) else None


def renaming(model: Any, own: Container[str]) -> Callable[[str], tuple[str, Any, str]]:
    """Return a function, by the table of transformers: name in a file -> (name in ``model``, its converter or None, the
    source pattern that matched). ``own``: the names of the model."""
    try:
        table = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
        loading = importlib.import_module("transformers.core_model_loading")
    except (ModuleNotFoundError, AttributeError):  # a version that builds models like their files
        return lambda name: (name, None, "")
    converters = [each for each in table if isinstance(each, loading.WeightConverter)]
    renamings = [each for each in table if not isinstance(each, loading.WeightConverter)]
    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}

    def rename(name: str) -> tuple[str, Any, str]:
        new, pattern = loading.rename_source_key(name, renamings, converters, model.base_model_prefix, own)
        return (new, of_pattern.get(pattern), pattern or "") if new in own else (name, None, "")

    return rename


def check_layers(config: Mapping[str, Any], tensors: int) -> None:
    """CheckpointError if ``config`` counts far more layers, as in num_hidden_layers and n_layer, than there are
    ``tensors``, or more than LABELS labels: making them would take forever, or all memory."""
    counts, labels = [0], [0]
    parts = [config]
    while parts:
        for key, value in parts.pop().items():
            if isinstance(value, dict):
                parts.append(value)
            elif type(value) is int and key.rpartition("_")[2] in ("layer", "layers"):
                counts.append(value)
            elif type(value) is int and key == "num_labels":
                labels.append(value)
    if max(counts) > tensors + LAYERS:
        raise CheckpointError(f"config.json describes {max(counts)} layers, and its files have {tensors} tensors")
    if max(labels) > LABELS:
        raise CheckpointError(f"config.json says num_labels {max(labels)}; up to {LABELS} are read")
