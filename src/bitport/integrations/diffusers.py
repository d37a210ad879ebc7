"""Load bitport checkpoints by diffusers, and quantize other models while it loads them, tensor by tensor::

    from bitport.integrations.diffusers import BitportConfig

    transformer = FluxTransformer2DModel.from_pretrained(directory)
    transformer = FluxTransformer2DModel.from_pretrained(name, quantization_config=BitportConfig("int4"))
    parts = PipelineQuantizationConfig(
        quant_mapping={"transformer": BitportConfig("int4"), "text_encoder_2": BitportConfig("int8")}
    )
    pipe = DiffusionPipeline.from_pretrained(name, quantization_config=parts)

Importing this module registers bitport with diffusers, and with transformers, which loads the text encoders.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from diffusers.quantizers.base import DiffusersQuantizer
from torch import Tensor

from bitport import plugins
from bitport.checkpoint.manifest import Manifest
from bitport.checkpoint.parse import read_manifest
from bitport.errors import ArgumentError, CheckpointError, counted, shortened
from bitport.integrations import pretrained
from bitport.integrations.components import spared
from bitport.integrations.pretrained import Loading, Original, Saving, Stored, twin_of
from bitport.integrations.transformers import NAME, BitportConfig
from bitport.nn.targets import find_targets
from bitport.numerics import FLOATS

__all__ = ["BitportConfig"]

SIZES: tuple[tuple[float, str], ...] = ((0.25, "INT2"), (0.5, "INT4"), (1, "FP8"))
"""Bytes per number -> accelerate's name for a type of that size."""
ROOM = 0.88
"""The share of a device's memory to plan with: 4-bit weights may have 12 % of scales on top."""


class Quantizer(Loading, DiffusersQuantizer):
    """Produces the tensors that ``work`` names and puts them into the model: diffusers passes each tensor it reads."""

    use_keep_in_fp32_modules = True
    dtype: torch.dtype | None = None
    """Cast float tensors to it; None: as in the checkpoint."""
    files: list[str] | None = None
    """Set while a bitport checkpoint is being loaded, as is ``held``, its manifest."""

    @property
    def config(self) -> BitportConfig:
        given: Any = self.quantization_config
        return given

    def update_torch_dtype(self, torch_dtype: Any) -> Any:
        if torch_dtype is not None and torch_dtype not in FLOATS:
            raise ArgumentError(
                f"a quantized model computes in float32, bfloat16 or float16, not in {torch_dtype}: give one of these "
                f"as dtype"
            )
        self.dtype = torch_dtype
        return torch_dtype

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: list[str]) -> list[str]:
        """Called after the files are found and before they are read."""
        if not self.pre_quantized:
            return loaded_keys
        self.files, self.held = checkpoint_files, read_manifest(Path(checkpoint_files[0]).parent)
        return [*(name for name, entry in self.held.tensors.items() if entry.buffer != "derived"), *self.held.tied]

    def _process_model_before_weight_loading(
        self, model: Any, keep_in_fp32_modules: Sequence[str] = (), **kwargs: Any
    ) -> None:
        plugins.load()
        self.float32 = set(keep_in_fp32_modules)
        if self.files is not None:
            check_names(model, Path(self.files[0]).parent, self.held)
            self.work = Stored(model, self.files, self.held, self.held, {})
            self.config.take(self.held)
        else:
            targets, config = find_targets(model), self.config
            assert config.recipe is not None
            self.work = Original(targets, spared(config.recipe, model, targets), config.algorithm, config.measure)

    def check_if_quantized_param(self, model: Any, param_value: Tensor, param_name: str, *args: Any, **kw: Any) -> bool:
        return self.work is not None and param_name in self.work.wanted

    def create_quantized_param(self, *args: Any, **kwargs: Any) -> Any:
        """Called with a model, a tensor, its name and its device."""
        model, param_value, param_name, target_device, *_ = args
        device = torch.device(target_device)
        if isinstance(self.work, Stored):
            own = torch.float32 if self.float32.intersection(param_name.split(".")) else self.dtype
            made = self.work.tensor(param_name, device, own)
        else:
            assert self.work is not None
            made = self.work.tensor(param_name, param_value.to(device))
        module, _, attribute = param_name.rpartition(".")
        setattr(model.get_submodule(module), attribute, made)

    def get_special_dtypes_update(self, model: Any, torch_dtype: Any) -> dict[str, Any]:
        """Sizes used to distribute tensors over devices: of the quantized ones in a checkpoint, else of the float
        ones."""
        if not isinstance(self.work, Stored):
            return {}
        from accelerate.utils import CustomDtype

        said: dict[str, Any] = {}
        for name, entry in self.work.wanted.items():
            bytes_each = entry.nbytes / max(1, math.prod(entry.shape))
            fitting = [kind for size, kind in SIZES if bytes_each * ROOM <= size]
            if entry.scheme is not None and fitting:
                said[name] = CustomDtype[fitting[0]]
        return said

    def adjust_max_memory(self, max_memory: dict[Any, Any]) -> dict[Any, Any]:
        return {place: room * ROOM for place, room in max_memory.items()}

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        work, self.work, self.files = self.work, None, None
        if isinstance(work, Stored):
            work.close()
            check_brought(work)
        elif work:
            self.report = work.report(model)
        model.save_pretrained = Saving(save_pretrained, model, twin_of(model))
        model.is_quantized = False  # diffusers refuses to cast quantized models to another dtype
        return model

    @property
    def supports_parallel_loading(self) -> bool:
        """False, so that only one tensor at a time is in memory besides the model."""
        return False

    @property
    def is_serializable(self) -> bool:
        return True


if not hasattr(DiffusersQuantizer, "maybe_update_loaded_keys"):
    raise ImportError("bitport.integrations.diffusers needs diffusers 0.39 or later: pip install -U diffusers")
AUTO_QUANTIZER_MAPPING[NAME] = Quantizer
AUTO_QUANTIZATION_CONFIG_MAPPING[NAME] = BitportConfig


def check_names(model: Any, path: Path, held: Manifest) -> None:
    """CheckpointError if the checkpoint ``held`` at ``path`` lacks a tensor of ``model`` or has an unknown one:
    diffusers would only warn, and return a model with uninitialized parts."""
    own, ignored = model.state_dict().keys(), model._keys_to_ignore_on_load_unexpected or ()
    there = {name for name, entry in held.tensors.items() if entry.buffer != "derived"} | held.tied.keys()
    unknown = [name for name in there - own if not any(re.search(pattern, name) for pattern in ignored)]
    if told := counted({"missing in the checkpoint": sorted(own - there), "unknown to the model": sorted(unknown)}):
        raise CheckpointError(f"{path} does not fit {type(model).__name__}. {told}")


def check_brought(work: Stored) -> None:
    if left := sorted(work.wanted.keys() - work.brought):
        raise ArgumentError(
            f"diffusers skipped {len(left)} tensors of {work.path}: {shortened(left)}; load it without "
            "ignore_mismatched_sizes and offload_state_dict, which are for plain arrays"
        )


def save_pretrained(
    model: Any,
    save_directory: str | Path,
    is_main_process: bool = True,
    safe_serialization: bool = True,
    variant: str | None = None,
    max_shard_size: int | str | None = None,
    use_flashpack: bool = False,
    **given: Any,
) -> None:
    """Replaces this method in a model that bitport has quantized. Pipelines only pass arguments in its signature."""
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ArgumentError(
            f"{type(model).__name__} has adapters ({', '.join(model.peft_config)}), which are not a part of a "
            "checkpoint: save_lora_adapter(directory) writes them, unload_lora() or the pipeline's "
            "unload_lora_weights() removes them"
        )
    given |= {"use_flashpack": use_flashpack, "safe_serialization": safe_serialization}
    pretrained.save_pretrained(model, save_directory, is_main_process, max_shard_size, variant, **given)
