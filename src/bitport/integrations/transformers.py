"""transformers loads checkpoints of bitport, and quantizes others while it loads them, tensor by tensor: no float model
is ever there as a whole::

    from bitport.integrations.transformers import BitportConfig

    model = AutoModelForCausalLM.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(name, quantization_config=BitportConfig("int4"))

The one is what ``load_model(directory)`` loads, the other what ``quantize_(model, "int4")`` makes, weight by weight.
Importing this module makes both known to transformers.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from torch import Tensor
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from bitport import plugins
from bitport.algorithms import Algorithm, expression
from bitport.algorithms import algorithm as algorithm_of
from bitport.algorithms.apply import apply
from bitport.checkpoint.manifest import INDEX, SAID, shortened
from bitport.errors import ArgumentError
from bitport.integrations.pretrained import Stored, save_pretrained
from bitport.nn.quantize import check_finite
from bitport.nn.targets import find_targets
from bitport.ops.device import check_device
from bitport.report import LayerReport, Report
from bitport.report.quantized import listed
from bitport.schemes import Choice, Recipe, Scheme, Target
from bitport.schemes.plan import refuse_static
from bitport.tensor.sharded import nbytes_of

__all__ = ["BitportConfig"]

NAME = SAID["quant_method"]
RUN = "load it in float, then quantize_(model, .., calibrate=batches); or bitport quantize --data FILE, and load that"


@register_quantization_config(NAME)
class BitportConfig(QuantizationConfigMixin):
    """``recipe``, ``algorithm``, ``measure``: as for :func:`bitport.quantize_`; only algorithms without data. What it
    returns is ``model.hf_quantizer.report``. For a checkpoint of bitport, which is quantized, they say nothing."""

    def __init__(
        self,
        recipe: str | Scheme | Recipe | Any = "int4",
        *,
        algorithm: str | Algorithm = "rtn",
        measure: bool = True,
        quant_method: str = NAME,
    ) -> None:
        self.quant_method = quant_method  # type: ignore[assignment]
        self.recipe, self.algorithm, self.measure = Recipe.of(recipe), algorithm_of(algorithm), measure
        if self.algorithm.needs_inputs:
            raise ArgumentError(
                f"{self.algorithm.name} looks at the inputs of layers, which are measured by running the model: {RUN}"
            )

    def to_dict(self) -> dict[str, Any]:
        """What config.json says of a model that was quantized: by what method, and no more."""
        return dict(SAID)


@register_quantizer(NAME)
class Quantizer(HfQuantizer):
    """transformers hands every tensor that ``work`` names to it, when it is on its device, and takes what it makes."""

    quantization_config: BitportConfig
    work: Stored | Original | None = None
    """Of a model that is being loaded."""

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Called with what the user gives, and with what is made of "auto"."""
        places = device_map.items() if isinstance(device_map, dict) else ()
        if on_disk := [name or "all" for name, place in places if place == "disk"]:
            raise ArgumentError(
                f"the device map leaves weights on disk ({shortened(on_disk)}), from where accelerate brings plain "
                f"arrays, not quantized tensors: give more memory (max_memory), more devices, or a scheme of fewer bits"
            )

    def update_attn_implementation(self, config: Any) -> Any:
        """What is called with the config before files are looked for: says which list them."""
        if self.pre_quantized:
            config.transformers_weights = INDEX
        return config

    update_tp_plan = update_attn_implementation
    """The same before transformers 5.20."""

    def update_weight_conversions(self, weight_conversions: list[Any], *args: Any) -> list[Any]:
        """A checkpoint comes under the names of the model."""
        return [] if isinstance(self.work, Stored) else super().update_weight_conversions(weight_conversions, *args)

    def _process_model_before_weight_loading(
        self, model: Any, dtype: Any = None, checkpoint_files: Any = None, **kwargs: Any
    ) -> None:
        plugins.load()
        if self.pre_quantized:
            del model.config.transformers_weights
            self.work = Stored(model, checkpoint_files, dtype)
            self.pre_quantized = False  # transformers asks quantizers of other models for parts of tensors
        else:
            self.work = Original(model, self.quantization_config)

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return self.work is not None and param_name in self.work.wanted

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """What devices are planned by: of a checkpoint what it takes there, of a float model what it takes now."""
        if isinstance(self.work, Stored) and param_name in self.work.wanted and param.numel():
            return self.work.wanted[param_name].nbytes / param.numel()
        return param.element_size()

    def get_quantize_ops(self) -> ConversionOps:
        assert self.work is not None
        return Give(self.work)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if isinstance(self.work, Stored):
            self.work.close()
            self.pre_quantized = True
        elif self.work:
            self.report = self.work.report(model)
        self.work = None
        model.save_pretrained = functools.partial(save_pretrained, model)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


class Give(ConversionOps):
    """The last step of a tensor from its files into the model."""

    def __init__(self, work: Stored | Original) -> None:
        self.work = work

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], full_layer_name: str, model: Any, **kwargs: Any
    ) -> dict[str, Tensor]:
        ((_, given),) = input_dict.items()
        value = given[0] if isinstance(given, list) else given
        return Late({full_layer_name: lambda: self.work.tensor(full_layer_name, value, model)})


class Late(dict[str, Any]):
    """Makes each tensor when it is taken. What goes wrong before, transformers catches: it goes on with the next one,
    and tells of it in a table when all are read."""

    def items(self) -> Any:
        return [(name, make()) for name, make in super().items()]


class Original:
    """The weights of a ``model`` in float, which are quantized when they come."""

    def __init__(self, model: Any, config: BitportConfig) -> None:
        targets = _tied(model, find_targets(model))
        self.config, self.plan = config, config.recipe.resolve(targets)
        refuse_static(self.plan.choices, RUN)
        self.targets = {target.name: target for target in targets}
        self.storages = {target.name: target.storage for target in targets}
        self.wanted = {choice.name: choice for choice in self.plan.quantized}
        self.told: dict[str, LayerReport] = {}
        """By storage: what came out."""

    def tensor(self, name: str, value: Tensor, model: Any) -> Tensor:
        target, choice, config = self.targets[name], self.wanted[name], self.config
        assert choice.scheme is not None
        check_finite(value, target)
        check_device(choice.scheme, value.device)
        outcome = apply(config.algorithm, value, target, choice.scheme, measure=config.measure).as_parameter()
        self.told[target.storage] = outcome.report(choice, value.nbytes)
        return outcome.q

    def report(self, model: Any) -> Report:
        config = self.config

        def left(choice: Choice) -> LayerReport:
            size = nbytes_of(model.get_parameter(choice.name))
            if choice.scheme:
                choice = dataclasses.replace(choice, reason="the files do not have it")
            return LayerReport.kept(choice, size, size)

        layers = listed(self.plan, self.storages, self.told, left)
        after = sum(nbytes_of(param) for param in model.parameters())
        before = after + sum(layer.bytes_before - layer.bytes_after for layer in self.told.values())
        return Report(layers, before, after, config.recipe.to_json(), expression(config.algorithm))


def _tied(model: Any, targets: list[Target]) -> list[Target]:
    """transformers ties weights when they are loaded; these will be one."""
    storages = {target.name: target.storage for target in targets}
    alias_of: dict[str, str] = model.all_tied_weights_keys
    return [
        dataclasses.replace(target, storage=storages.get(alias_of.get(target.name, ""), target.storage))
        for target in targets
    ]
