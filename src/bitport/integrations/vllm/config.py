"""The quantization method registered with vLLM: which layers take weights from a bitport checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

import bitport
from bitport.checkpoint.manifest import NAME as MANIFEST
from bitport.errors import ArgumentError
from bitport.integrations.vllm import NAME
from bitport.integrations.vllm.experts import Experts
from bitport.integrations.vllm.layers import Weights


@register_quantization_config(NAME)
class Quantization(QuantizationConfig):
    """The tensors of the checkpoint describe themselves, so nothing is decided by layer names: each layer takes what
    its loader receives, quantized or not."""

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return [MANIFEST]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Quantization:
        """``config``: from config.json, or else the manifest. Not used, because the loader reads the manifest."""
        return cls()

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Include the checkpoint in vLLM's key for compiled programs. They depend on the schemes too, which another
        checkpoint at the same path may not share."""
        if hf_config is not None:
            manifest = get_hf_file_to_dict(MANIFEST, model_name, revision) or {}
            hf_config.bitport = [bitport.__version__, manifest.get("crc32")]

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        _check_load_format()
        if isinstance(layer, RoutedExperts):
            return Experts(layer.moe_config)
        return Weights() if isinstance(layer, LinearBase | VocabParallelEmbedding) else None


def _check_load_format() -> None:
    given = get_current_vllm_config().load_config.load_format
    if given != NAME:
        raise ArgumentError(
            f"a model quantized by {NAME} was given with --load-format {given}, which does not read checkpoints of "
            f"bitport: give --load-format {NAME} too"
        )
