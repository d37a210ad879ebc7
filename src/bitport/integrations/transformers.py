"""Quantizing while transformers loads a model, tensor by tensor: the float model is never there as a whole::

    from bitport.integrations.transformers import BitportConfig

    model = AutoModelForCausalLM.from_pretrained(name, quantization_config=BitportConfig("int4"))

What comes out is what ``quantize_(model, "int4")`` makes, weight by weight. Importing this module makes it known to
transformers. A checkpoint of bitport is loaded by :func:`bitport.integrations.huggingface.load_model`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from bitport import plugins
from bitport.algorithms import Algorithm, expression
from bitport.algorithms import algorithm as algorithm_of
from bitport.algorithms.apply import Outcome, apply
from bitport.errors import ArgumentError
from bitport.nn.quantize import check_finite
from bitport.nn.targets import find_targets
from bitport.ops.device import check_device
from bitport.report import LayerReport, Report
from bitport.schemes import Recipe, Scheme, Target
from bitport.tensor.sharded import nbytes_of

NAME = "bitport"

logger = logging.get_logger(f"transformers.{__name__}")
"""transformers shows what loggers below its own name say."""


@register_quantization_config(NAME)
class BitportConfig(QuantizationConfigMixin):
    """``recipe``, ``algorithm``, ``measure``: as for :func:`bitport.quantize_`; only algorithms without data. What it
    returns is ``model.hf_quantizer.report``."""

    def __init__(
        self,
        recipe: str | Scheme | Recipe | Any = "int4",
        *,
        algorithm: str | Algorithm = "rtn",
        measure: bool = True,
    ) -> None:
        self.quant_method = NAME  # type: ignore[assignment]
        self.recipe, self.algorithm, self.measure = Recipe.of(recipe), algorithm_of(algorithm), measure
        if self.algorithm.needs_inputs:
            raise ArgumentError(
                f"{self.algorithm.name} looks at the inputs of layers, which are not there while a model is loaded: "
                f"bitport quantize --algorithm {self.algorithm.name}, or quantize_(model, .., calibrate=batches)"
            )

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": NAME, "recipe": self.recipe.to_json(), "algorithm": expression(self.algorithm)}


@register_quantizer(NAME)
class Quantizer(HfQuantizer):
    """transformers hands every tensor that the plan names to :meth:`quantized`, when it is on its device."""

    quantization_config: BitportConfig

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        plugins.load()
        targets = _tied(model, find_targets(model))
        self.plan = self.quantization_config.recipe.resolve(targets)
        static = [choice.name for choice in self.plan.quantized if choice.scheme and choice.scheme.static]
        if static:
            raise ArgumentError(
                f"{len(static)} layers have a static input scale ({static[0]}, ..), which is calibrated: load the "
                f"model in float, then quantize_(model, .., calibrate=batches)"
            )
        self.targets = {target.name: target for target in targets}
        self.wanted = {choice.name: choice for choice in self.plan.quantized}
        self.done: dict[str, tuple[Outcome, int]] = {}
        """storage -> what came out, and the bytes that it was."""

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return param_name in self.wanted

    def get_quantize_ops(self) -> ConversionOps:
        return Quantize(self)

    def quantized(self, name: str, value: Tensor) -> Tensor:
        target, choice, config = self.targets[name], self.wanted[name], self.quantization_config
        assert choice.scheme is not None
        check_finite(value, target)
        check_device(choice.scheme, value.device)
        outcome = apply(config.algorithm, value, target, choice.scheme, measure=config.measure).as_parameter()
        self.done[target.storage] = outcome, value.nbytes
        return outcome.q

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        """What is written beside a checkpoint of this model is not to say that transformers can read it."""
        del model.config.quantization_config
        config = self.quantization_config
        first = {target.storage: name for name, target in reversed(self.targets.items())}
        layers = []
        for choice in self.plan.choices:
            storage = self.targets[choice.name].storage
            if choice.scheme and storage in self.done:
                outcome, size = self.done[storage]
                layer = outcome.report(choice, size)
            else:
                size = nbytes_of(model.get_parameter(choice.name))
                reason = "the files do not have it" if choice.scheme else choice.reason
                layer = LayerReport(choice.name, None, reason, size, size)
            layers.append(dataclasses.replace(layer, tied=first[storage] != choice.name))
        after = sum(nbytes_of(param) for param in model.parameters())
        before = after + sum(size - nbytes_of(outcome.q) for outcome, size in self.done.values())
        self.report = Report(tuple(layers), before, after, config.recipe.to_json(), expression(config.algorithm))
        return model

    def is_serializable(self) -> bool:
        """What the error of save_pretrained refers to."""
        logger.warning("bitport.integrations.huggingface.save_model(model, directory, tokenizer) saves this model")
        return False

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


class Quantize(ConversionOps):
    """The last step of a tensor from its files into the model."""

    def __init__(self, quantizer: Quantizer) -> None:
        self.quantizer = quantizer

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], full_layer_name: str, **kwargs: Any
    ) -> dict[str, Tensor]:
        ((_, given),) = input_dict.items()
        value = given[0] if isinstance(given, list) else given
        return {full_layer_name: self.quantizer.quantized(full_layer_name, value)}


def _tied(model: Any, targets: list[Target]) -> list[Target]:
    """transformers ties weights when they are loaded; these will be one."""
    storages = {target.name: target.storage for target in targets}
    alias_of: dict[str, str] = model.all_tied_weights_keys
    return [
        dataclasses.replace(target, storage=storages.get(alias_of.get(target.name, ""), target.storage))
        for target in targets
    ]
