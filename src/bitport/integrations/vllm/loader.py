"""vLLM's loader for bitport checkpoints: whole tensors under the names of the files, quantized ones as QTensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from vllm.config import LoadConfig, ModelConfig
from vllm.logger import init_logger
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.weight_utils import download_weights_from_hf

from bitport.checkpoint import read_manifest
from bitport.checkpoint.load import read_plain
from bitport.checkpoint.shards import Shards
from bitport.errors import ArgumentError, shortened
from bitport.integrations.vllm import NAME
from bitport.tensor import QTensor

logger = init_logger(f"vllm.{__name__}")
"""vLLM only shows loggers below its own name."""


@register_model_loader(NAME)
class Loader(BaseModelLoader):
    """``--model-loader-extra-config '{"verify": false}'`` skips the comparison of data with checksums."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        extra: dict[str, Any] = dict(load_config.model_loader_extra_config or {})
        self.verify = extra.pop("verify", True)
        if extra or not isinstance(self.verify, bool):
            given = load_config.model_loader_extra_config
            raise ArgumentError(f"the extra config of load format {NAME} is {{'verify': true or false}}, not {given}")

    def download_model(self, model_config: ModelConfig) -> None:
        self._directory(model_config)

    def load_weights(self, model: Any, model_config: ModelConfig) -> None:
        if model_config.quantization != NAME:
            raise ArgumentError(
                f"--load-format {NAME} was given with --quantization {model_config.quantization}: give "
                f"--quantization {NAME} too"
            )
        tied = bool(getattr(model_config.hf_text_config, "tie_word_embeddings", False))
        reading = Reading(self._directory(model_config), aliases=not tied, verify=self.verify)
        try:
            with reading:
                model.load_weights(reading.tensors())
        except ArgumentError as error:
            raise ArgumentError(
                f"{type(model).__name__} of vLLM cannot take {reading.name}: {error}. Quantize the model with a rule "
                f"that leaves it out: {{{reading.name.removesuffix('.weight')!r}: 'skip', ..}}"
            ) from error
        if reading.as_floats:
            logger.warning("vLLM keeps these in float, their values are dequantized: %s", shortened(reading.as_floats))

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


class Reading(TorchFunctionMode):
    """Reads a checkpoint. ``aliases``: yield tied tensors under each of their names, for a model that does not tie
    them.

    Within this context, copying a quantized tensor into one of vLLM's own parameters (routers, as a rule) dequantizes
    it."""

    def __init__(self, directory: Path, *, aliases: bool, verify: bool) -> None:
        super().__init__()
        self.directory, self.verify = directory, verify
        self.manifest = read_manifest(directory)
        self.tied = self.manifest.tied if aliases else {}
        self.name = ""
        """Name of the tensor being read."""
        self.as_floats: list[str] = []

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        with Shards(self.directory, self.manifest, verify=self.verify, mmap=True) as shards:
            for name, entry in self.manifest.tensors.items():
                if entry.buffer == "derived":
                    continue
                tensor = read_plain(shards, self.directory, entry)
                for each in (name, *(alias for alias, held in self.tied.items() if held == name)):
                    self.name = each
                    yield each, tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_ and isinstance(args[1], QTensor) and not isinstance(args[0], QTensor):
            self.as_floats.append(self.name)
            args = (args[0], args[1].dequantize(args[0].dtype), *args[2:])
        return func(*args, **(kwargs or {}))
