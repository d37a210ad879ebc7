"""transformers loads checkpoints of bitport, and quantizes others while it loads them, tensor by tensor: the float
model is never in memory as a whole::

    from bitport.integrations.transformers import BitportConfig

    model = AutoModelForCausalLM.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(name, quantization_config=BitportConfig("int4"))

The one is what ``load_model(directory)`` loads, the other what ``quantize_(model, "int4")`` makes, weight by weight.
Importing this module makes both known to transformers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from bitport import plugins
from bitport.algorithms import Algorithm, expression
from bitport.algorithms import algorithm as algorithm_of
from bitport.api import dequantize_
from bitport.checkpoint.manifest import INDEX, SAID
from bitport.checkpoint.parse import read_manifest
from bitport.checkpoint.safetensors_reader import SafetensorsReader
from bitport.errors import ArgumentError
from bitport.integrations.names import arrangement
from bitport.integrations.pretrained import RUN, Loading, Original, Saving, Stored, save_pretrained, twin_of
from bitport.nn.targets import find_targets
from bitport.schemes import Recipe, RecipeLike, Target
from bitport.train.scales import learns_scales

__all__ = ["BitportConfig"]

NAME = SAID["quant_method"]


class Method(str, enum.Enum):
    """diffusers asks a method for its ``value``."""

    BITPORT = NAME


@register_quantization_config(NAME)
class BitportConfig(QuantizationConfigMixin):
    """``recipe``, ``algorithm``, ``measure``: as for :func:`bitport.quantize_`; only algorithms without data. What it
    returns is ``model.hf_quantizer.report``. For a checkpoint of bitport, which is quantized already, they change
    nothing. Models of diffusers take it too, where bitport.integrations.diffusers was imported."""

    def __init__(
        self,
        recipe: RecipeLike = "int4",
        *,
        algorithm: str | Algorithm = "rtn",
        measure: bool = True,
        quant_method: str = NAME,
    ) -> None:
        self.quant_method = Method(quant_method)  # type: ignore[assignment]
        self.recipe, self.algorithm, self.measure = Recipe.of(recipe), algorithm_of(algorithm), measure
        if self.algorithm.needs_inputs:
            raise ArgumentError(
                f"{self.algorithm.name} looks at the inputs of layers, which are measured by running the model: {RUN}"
            )

    def __repr__(self) -> str:
        rules = ", ".join(f"{rule.match}={rule.scheme}" for rule in self.recipe.rules)
        return f"BitportConfig({rules}; algorithm={expression(self.algorithm)}, measure={self.measure})"

    def to_dict(self) -> dict[str, Any]:
        """What config.json says of a model that was quantized: by what method, and no more."""
        return dict(SAID)


@register_quantizer(NAME)
class Quantizer(Loading, HfQuantizer):
    """Makes the tensors that ``work`` names: transformers hands it each one that is read, on its device, and puts what
    it returns into the model."""

    quantization_config: BitportConfig
    model: Any
    """The twin of the model that was loaded."""
    parts: Sequence[Sequence[str]] = ()
    """For each conversion: the parts of names in which tensors differ that are a single one in the files."""

    def update_attn_implementation(self, config: Any) -> Any:
        """Called with the config before files are looked for: sets the name of the one that lists them."""
        if self.pre_quantized:
            config.transformers_weights = INDEX
        return config

    update_tp_plan = update_attn_implementation
    """Called in its place before transformers 5.20."""

    def update_weight_conversions(self, weight_conversions: list[Any], *args: Any) -> list[Any]:
        """None for a checkpoint, whose tensors are handed over under the names of the model."""
        if isinstance(self.work, Stored):
            return []
        conversions: list[Any] = super().update_weight_conversions(weight_conversions, *args)
        self.parts = [each.target_patterns for each in conversions]
        return conversions

    def _process_model_before_weight_loading(
        self, model: Any, dtype: Any = None, checkpoint_files: Any = None, **kwargs: Any
    ) -> None:
        plugins.load()
        ties: dict[str, str] = model.all_tied_weights_keys
        if self.pre_quantized:
            del model.config.transformers_weights
            self.work = stored(model, checkpoint_files, ties)
            self.pre_quantized = False  # transformers asks quantizers of other models for parts of tensors
        else:
            config = self.quantization_config
            targets = tied(find_targets(model), kept(ties, checkpoint_files or ()))
            self.work = Original(targets, config.recipe, config.algorithm, config.measure)
        self.dtype = dtype

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """For tensors that are one in the files, transformers asks about the first. Later it asks again about each
        whose shape is not that of the model, which it reports itself."""
        if isinstance(self.work, Original) and param_name in self.work.misfits:
            return False
        return self.work is not None and not self.work.wanted.keys().isdisjoint(self._with(param_name))

    def _with(self, name: str) -> list[str]:
        others = [name.replace(first, each) for first, *rest in self.parts if first in name for each in rest]
        return [name, *others]

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """The size by which tensors are spread over devices: in a checkpoint the quantized one, else the float one."""
        if isinstance(self.work, Stored) and param_name in self.work.wanted and param.numel():
            return self.work.wanted[param_name].nbytes / param.numel()
        return param.element_size()

    def get_quantize_ops(self) -> ConversionOps:
        assert self.work is not None
        return Give(self.work, self.dtype)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if isinstance(self.work, Stored):
            self.work.close()
            self.pre_quantized = True
        elif self.work:
            self.report = self.work.report(model)
        self.work, self.model = None, twin_of(model)
        model.save_pretrained = Saving(save, model, self.model)
        return model

    def dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        """Called by model.dequantize(dtype) of transformers. From then on it is a float model, and saved as one."""
        dequantize_(model, dtype)
        del model.save_pretrained
        self.remove_quantization_config(model)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """Whether the Trainer may train the model without adapters: where its scales are learned."""
        return learns_scales(self.model)


class Give(ConversionOps):
    """The last step of a tensor from its files into the model, which is to compute in ``dtype``."""

    def __init__(self, work: Stored | Original, dtype: torch.dtype | None) -> None:
        self.work, self.dtype = work, dtype

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], full_layer_name: str, model: Any, **kwargs: Any
    ) -> dict[str, Tensor]:
        named = input_dict if len(input_dict) > 1 else dict.fromkeys([full_layer_name], *input_dict.values())
        return Late({name: functools.partial(self._made, name, given) for name, given in named.items()})

    def _made(self, name: str, given: Any) -> Tensor:
        value: Tensor = given[0] if isinstance(given, list) else given
        if name not in self.work.wanted:
            return value
        if isinstance(self.work, Original):
            return self.work.tensor(name, value)
        own = self.work.own[name].dtype  # all are asked for in the dtype of the model, whatever this one is made in
        return self.work.tensor(name, value.device, own if value.dtype == self.dtype else value.dtype)


class Late(dict[str, Any]):
    """Makes each tensor when it is taken. An error raised before that transformers would catch: it would go on with the
    next tensor, and list the error in a table once all are read."""

    def items(self) -> Any:
        return [(name, make()) for name, make in super().items()]


def stored(model: Any, files: list[str], ties: dict[str, str]) -> Stored:
    if getattr(model.config, "distributed_config", None) is not None:
        raise ArgumentError(
            "a distributed_config (tp_plan) cuts tensors while they are read, which quantized ones are not: load "
            "the model whole and shard it then (docs/distributed.md)"
        )
    held = read_manifest(Path(files[0]).parent)
    return Stored(model, files, held, arrangement(model)(held), ties)


def kept(ties: dict[str, str], files: Sequence[str]) -> dict[str, str]:
    """Those of ``ties`` that transformers will make: not a pair that ``files`` hold with different numbers."""
    with contextlib.ExitStack() as stack:
        readers = [
            stack.enter_context(SafetensorsReader(Path(file))) for file in files if file.endswith(".safetensors")
        ]
        held = {name: reader for reader in readers for name in reader.tensors}

        def apart(*names: str) -> bool:
            if not held.keys() >= {*names}:
                return False
            a, b = (held[name].read(name) for name in names)
            return not (a.dtype == b.dtype and torch.equal(a, b))

        return {alias: name for alias, name in ties.items() if not apart(alias, name)}


def tied(targets: list[Target], alias_of: dict[str, str]) -> list[Target]:
    """``targets`` with one storage for those that transformers will tie once they are loaded."""
    storages = {target.name: target.storage for target in targets}
    return [
        dataclasses.replace(target, storage=storages.get(alias_of.get(target.name, ""), target.storage))
        for target in targets
    ]


def save(
    model: Any,
    save_directory: str | Path,
    is_main_process: bool = True,
    max_shard_size: int | str | None = None,
    variant: str | None = None,
    **given: Any,
) -> None:
    """If the model has adapters, transformers' own method writes those alone."""
    size = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    adapted = getattr(model, "_hf_peft_config_loaded", False)
    write = type(model).save_pretrained if adapted else save_pretrained
    write(model, save_directory, is_main_process=is_main_process, variant=variant, **size, **given)
