"""How vLLM reads a checkpoint of bitport: whole tensors under the names of the files, quantized ones as QTensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import LoadConfig, ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.weight_utils import download_weights_from_hf

from bitport.checkpoint import read_manifest
from bitport.checkpoint.load import read_plain
from bitport.checkpoint.shards import Shards
from bitport.errors import ArgumentError
from bitport.integrations.vllm import NAME


@register_model_loader(NAME)
class Loader(BaseModelLoader):
    """``--model-loader-extra-config '{"verify": false}'``: do not compare the data with its checksums."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        extra: dict[str, Any] = dict(load_config.model_loader_extra_config or {})
        self.verify = extra.pop("verify", True)
        if extra or not isinstance(self.verify, bool):
            given = load_config.model_loader_extra_config
            raise ArgumentError(f"the extra config of load format {NAME} is {{'verify': true or false}}, not {given}")

    def download_model(self, model_config: ModelConfig) -> None:
        self._directory(model_config)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        if model_config.quantization != NAME:
            raise ArgumentError(
                f"--load-format {NAME} was given with --quantization {model_config.quantization}: give "
                f"--quantization {NAME} too"
            )
        tied = bool(getattr(model_config.hf_text_config, "tie_word_embeddings", False))
        model.load_weights(self._tensors(self._directory(model_config), aliases=not tied))

    def _directory(self, model_config: ModelConfig) -> Path:
        given = Path(model_config.model)
        if given.is_dir():
            return given
        patterns = ["*.safetensors", "*.json"]
        return Path(
            download_weights_from_hf(
                model_config.model, self.load_config.download_dir, patterns, model_config.revision, None
            )
        )

    def _tensors(self, directory: Path, *, aliases: bool) -> Iterator[tuple[str, Tensor]]:
        """``aliases``: tied tensors under each of their names, for a model that does not tie them itself."""
        manifest = read_manifest(directory)
        names = {name: [name] for name in manifest.tensors}
        for alias, name in manifest.tied.items() if aliases else ():
            names[name].append(alias)
        with Shards(directory, manifest, verify=self.verify, mmap=True) as shards:
            for name, entry in manifest.tensors.items():
                if entry.buffer == "derived":
                    continue
                tensor = read_plain(shards, directory, entry, torch.device("cpu"))
                for each in names[name]:
                    yield each, tensor
