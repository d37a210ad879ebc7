"""The shapes of a model's weights, from its config.json, for files that do not contain them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bitport.errors import CheckpointError
from bitport.optional import UNREADABLE, optional

LEFT_OUT = ("quantization_config", "compression_config", "auto_map")
"""Keys of config.json to ignore: quantization is read here, and custom code is never run."""
FACTOR, SPARE = 4, 1000
"""Limits on the tensors of a model: at most FACTOR times the tensors in its files, plus SPARE."""
LAYERS = 100
"""How many more layers than tensors a config.json may name: those of small models keep defaults, such as the 28 of
max_window_layers."""


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


def shapes_of(config: Mapping[str, Any], tensors: int) -> dict[str, tuple[int, ...]]:
    """Name of a weight -> its shape, in the causal language model that ``config`` describes. ``tensors``: number of
    tensors in its files. Nothing is allocated, and no custom code is run."""
    transformers = optional(
        "transformers", "hf", "the files do not hold the shapes of their weights; finding them by config.json needs"
    )
    check_layers(config, tensors)
    kept = {key: value for key, value in config.items() if key not in LEFT_OUT}
    bad_config = importlib.import_module("huggingface_hub.errors").StrictDataclassError
    try:
        described = transformers.AutoConfig.for_model(**kept)
        with torch.device("meta"), Bounded(FACTOR * tensors + SPARE):
            model = transformers.AutoModelForCausalLM.from_config(described, trust_remote_code=False)
            return {name: tuple(value.shape) for name, value in model.state_dict().items()}
    except CheckpointError:
        raise
    except (*UNREADABLE, bad_config) as error:
        raise CheckpointError(
            "the files do not hold the shapes of these weights, and transformers cannot make the causal language "
            f"model of config.json, which has them: {' '.join(str(error).split())}"
        ) from error


def check_layers(config: Mapping[str, Any], tensors: int) -> None:
    """CheckpointError if ``config`` counts far more layers, as in num_hidden_layers and n_layer, than there are
    ``tensors``: making them would take forever."""
    parts = (config, *(part for part in config.values() if isinstance(part, dict)))
    counts = [
        value
        for part in parts
        for key, value in part.items()
        if key.rpartition("_")[2] in ("layer", "layers") and type(value) is int
    ]
    if max(counts, default=0) > tensors + LAYERS:
        raise CheckpointError(f"config.json describes {max(counts)} layers, and its files have {tensors} tensors")
