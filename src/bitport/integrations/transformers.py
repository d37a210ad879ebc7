"""Load bitport checkpoints by transformers, and quantize other models while it loads them, tensor by tensor, without
the whole float model in memory::

    from bitport.integrations.transformers import BitportConfig

    model = AutoModelForCausalLM.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(name, quantization_config=BitportConfig("int4"))

The first loads what ``load_model(directory)`` loads, the second makes what ``quantize_(model, "int4")`` makes,
weight by weight. Importing this module registers bitport with transformers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import re
from collections import Counter
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
from bitport.checkpoint.manifest import INDEX, SAID, Manifest
from bitport.checkpoint.parse import read_manifest
from bitport.checkpoint.safetensors_reader import SafetensorsReader
from bitport.errors import ArgumentError
from bitport.integrations.pretrained import RUN, Loading, Original, Saving, Stored, save_pretrained, twin_of
from bitport.integrations.transformers_names import arrangement
from bitport.nn.targets import find_targets
from bitport.schemes import KINDS, Recipe, RecipeLike, Rule, Target
from bitport.train.scales import learns_scales

__all__ = ["BitportConfig"]

NAME = SAID["quant_method"]


class Method(str, enum.Enum):
    """An enum, because diffusers reads the ``value`` of a method."""

    BITPORT = NAME


@register_quantization_config(NAME)
class BitportConfig(QuantizationConfigMixin):
    """For ``from_pretrained(.., quantization_config=..)``: quantizes each weight when it is loaded.

    ``recipe``, ``algorithm``, ``measure``: as for :func:`bitport.quantize_`, but only algorithms without data.
    ``modules_to_not_convert``: modules that stay as they are whatever the recipe says. As for other quantizers of
    transformers, each is the name of a module (with all in it), a regular expression for some, or the end of a name;
    one that fits no weight is an error.
    The report is ``model.hf_quantizer.report``. Checkpoints of bitport are quantized already and are loaded as they
    are: the config of such a model has no recipe, and ``stored`` says how many weights have which scheme. Models of
    diffusers take it too, once bitport.integrations.diffusers was imported.
    """

    recipe: Recipe | None
    stored: dict[str, int] | None = None

    def __init__(
        self,
        recipe: RecipeLike = "int4",
        *,
        algorithm: str | Algorithm = "rtn",
        measure: bool = True,
        modules_to_not_convert: Sequence[str] | None = None,
        quant_method: str = NAME,
    ) -> None:
        self.quant_method = Method(quant_method)  # type: ignore[assignment]
        rules = (*left_alone(modules_to_not_convert or ()), *Recipe.of(recipe).rules)
        self.recipe, self.algorithm, self.measure = Recipe(rules), algorithm_of(algorithm), measure
        if self.algorithm.needs_inputs:
            raise ArgumentError(
                f"{self.algorithm.name} looks at the inputs of layers, which are measured by running the model: {RUN}"
            )

    def take(self, held: Manifest) -> None:
        """Describe the checkpoint ``held`` instead of what to make."""
        self.recipe = None
        self.stored = dict(Counter(str(entry.scheme) for entry in held.tensors.values() if entry.scheme))

    def __repr__(self) -> str:
        if self.recipe is None:
            told = ", ".join(f"{scheme} ({count})" for scheme, count in (self.stored or {}).items())
            return f"BitportConfig(as stored: {told or 'floats'})"
        rules = ", ".join(f"{rule.match}={rule.scheme}" for rule in self.recipe.rules)
        return f"BitportConfig({rules}; algorithm={expression(self.algorithm)}, measure={self.measure})"

    def to_dict(self) -> dict[str, Any]:
        """The entry in config.json of a quantized model: only the method."""
        return dict(SAID)

    def get(self, key: str, default: Any = None) -> Any:
        """As of that entry, for which from_pretrained takes what it finds in a config, also in that of a model."""
        return self.to_dict().get(key, default)


@register_quantizer(NAME)
class Quantizer(Loading, HfQuantizer):
    """Produces the tensors that ``work`` names: transformers passes each tensor that it reads, on its device, and puts
    the result into the model."""

    quantization_config: BitportConfig
    model: Any
    """A twin of the loaded model."""
    parts: Sequence[Sequence[str]] = ()
    """For each conversion, the parts of the names by which tensors differ that are one tensor in the files."""

    def update_attn_implementation(self, config: Any) -> Any:
        """Called with the config before files are searched: sets the name of the index file."""
        if self.pre_quantized:
            config.transformers_weights = INDEX
        return config

    update_tp_plan = update_attn_implementation
    """The hook that transformers before 5.20 calls instead."""

    def update_weight_conversions(self, weight_conversions: list[Any], *args: Any) -> list[Any]:
        """No conversions for a checkpoint, whose tensors are provided under the names of the model."""
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
            self.quantization_config.take(self.work.held)
            self.pre_quantized = False  # otherwise transformers treats the tensors as parts of quantized ones
        else:
            config = self.quantization_config
            assert config.recipe is not None
            targets = tied(find_targets(model), kept(ties, checkpoint_files or ()))
            self.work = Original(targets, config.recipe, config.algorithm, config.measure)
        self.dtype = dtype

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """If several tensors are one in the files, transformers asks about the first. It asks again later about each
        whose shape differs from the model's, and reports these itself."""
        if isinstance(self.work, Original) and param_name in self.work.misfits:
            return False
        return self.work is not None and not self.work.wanted.keys().isdisjoint(self._with(param_name))

    def _with(self, name: str) -> list[str]:
        others = [name.replace(first, each) for first, *rest in self.parts if first in name for each in rest]
        return [name, *others]

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """The size used to distribute tensors over devices: of the quantized tensor in a checkpoint, else of the float
        one."""
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
        """Called by model.dequantize(dtype) of transformers. Afterwards it is saved as an ordinary float model."""
        dequantize_(model, dtype)
        del model.save_pretrained
        self.remove_quantization_config(model)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """Whether the Trainer may train the model without adapters: if its scales are learned."""
        return learns_scales(self.model)


class Give(ConversionOps):
    """The final conversion of a tensor from the files to the model, which computes in ``dtype``."""

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
        own = self.work.own[name].dtype  # transformers requests the model's dtype, even for parameters with another
        return self.work.tensor(name, value.device, own if value.dtype == self.dtype else value.dtype)


def left_alone(names: Sequence[str]) -> list[Rule]:
    """The rule of transformers (should_convert_module): a name fits as a regular expression, from the start of the name
    of a module to the end of a part of it, or as its end."""
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
        raise ArgumentError(f"modules_to_not_convert is a list of names of modules, such as ['lm_head'], not {names!r}")
    return [Rule(rf"re:(?:{name})(?:(?<=\.).*|\..*)?|.*{re.escape(name)}", "skip", KINDS) for name in names]


class Late(dict[str, Any]):
    """Creates each tensor when it is accessed. Transformers would catch errors raised before that, continue with the
    next tensor, and only list them in a table at the end."""

    def items(self) -> Any:
        return [(name, make()) for name, make in super().items()]


def stored(model: Any, files: list[str] | None, ties: dict[str, str]) -> Stored:
    if not files:
        raise ArgumentError(
            "the config is that of a checkpoint of bitport, which from_pretrained reads from a directory: load a "
            "state_dict by load_state_dict into such a model, or give a config without quantization_config"
        )
    if getattr(model.config, "distributed_config", None) is not None:
        raise ArgumentError(
            "a distributed_config (tp_plan) cuts tensors while they are read, which quantized ones are not: load "
            "the model whole and shard it then (docs/distributed.md)"
        )
    held = read_manifest(Path(files[0]).parent)
    return Stored(model, files, held, arrangement(model)(held), ties)


def kept(ties: dict[str, str], files: Sequence[str]) -> dict[str, str]:
    """The ``ties`` that transformers will make: not those of pairs that have different numbers in ``files``."""
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
    """``targets`` with one storage for those that transformers will tie after loading."""
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
    """Save the model; if it has adapters, only those, by transformers' own method."""
    size = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    adapted = getattr(model, "_hf_peft_config_loaded", False)
    write = type(model).save_pretrained if adapted else save_pretrained
    write(model, save_directory, is_main_process=is_main_process, variant=variant, **size, **given)
