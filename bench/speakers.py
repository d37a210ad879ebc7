"""Text generators for benchmarks: each reads a prompt, then writes one token after the other, and returns seconds.

All torch models run through the same loop with the same static cache, so that the modes differ in nothing else.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import bitport
from bench.models import model_of, settings_of
from bitport.integrations.cache_name import with_cache


class Speakers:
    """One model of one library, and the modes that it can run in."""

    def __init__(self, library: str, model: str, scheme: str, length: int, layers: int | None = None) -> None:
        self._of = LIBRARIES[library](model, scheme, length, layers)

    def read(self, mode: str, prompt: list[int]) -> float:
        return float(self._of.read(mode, prompt))

    def write(self, mode: str, tokens: int) -> float:
        return float(self._of.write(mode, tokens))

    def logits(self, mode: str, prompt: list[int]) -> Any:
        """The logits after the prompt and after one more token, as an array; None if the weights are meaningless."""
        return self._of.logits(mode, prompt)


class Transformer:
    """A transformers model, in eager mode, compiled, or compiled with freezing, which makes its weights constants that
    oneDNN may reorder."""

    def __init__(self, model: Any, length: int) -> None:
        from transformers import StaticCache

        self._model = model
        self._steps = {
            "eager": model,
            "compiled": torch.compile(model.forward, dynamic=False),
            "frozen": torch.compile(model.forward, dynamic=False, options={"freezing": True}),
        }
        config = model.config
        heads = config.num_key_value_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._cache = StaticCache(config=config, max_cache_len=length)
        self._cache.early_initialization(1, heads, size, torch.bfloat16, torch.device("cpu"))

    @torch.inference_mode()
    def read(self, mode: str, prompt: list[int]) -> float:
        self._cache.reset()
        ids = torch.tensor([prompt])
        start = time.perf_counter()
        self._token = self._next(self._steps[mode], ids)
        return time.perf_counter() - start

    @torch.inference_mode()
    def logits(self, mode: str, prompt: list[int]) -> Any:
        self._cache.reset()
        found = [self._step(self._steps[mode], torch.tensor([ids])) for ids in (prompt, prompt[:1])]
        return torch.cat(found).float().numpy()

    @torch.inference_mode()
    def write(self, mode: str, tokens: int) -> float:
        step = self._steps[mode]
        start = time.perf_counter()
        for _ in range(tokens):
            self._token = self._next(step, self._token)
        return time.perf_counter() - start

    def _next(self, step: Any, ids: torch.Tensor) -> torch.Tensor:
        return self._step(step, ids).argmax(-1, keepdim=True)

    def _step(self, step: Any, ids: torch.Tensor) -> torch.Tensor:
        given = {"input_ids": ids, "use_cache": True, "logits_to_keep": 1, **with_cache(self._model, self._cache)}
        logits: torch.Tensor = step(**given).logits
        return logits[:, -1]


class LlamaCpp:
    def __init__(self, model: str, kind: str, length: int, layers: int | None) -> None:
        import llama_cpp

        from bench import gguf_model

        threads = torch.get_num_threads()
        options = {"n_threads": threads, "n_threads_batch": threads, "n_ctx": length, "verbose": False}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            gguf_model.write(path, settings_of(model, layers), kind)
            self._llama = llama_cpp.Llama(str(path), n_batch=512, use_mmap=False, **options)

    def read(self, mode: str, prompt: list[int]) -> float:
        self._llama.reset()
        start = time.perf_counter()
        self._llama.eval(prompt)
        return time.perf_counter() - start

    def write(self, mode: str, tokens: int) -> float:
        start = time.perf_counter()
        for at in range(tokens):
            self._llama.eval([1 + at])
        return time.perf_counter() - start

    def logits(self, mode: str, prompt: list[int]) -> None:
        return None


def plain(name: str, scheme: str, length: int, layers: int | None) -> Transformer:
    return Transformer(model_of(name, layers), length)


def own(name: str, scheme: str, length: int, layers: int | None) -> Transformer:
    model = model_of(name, layers)
    bitport.quantize_(model, scheme, measure=False, progress=False)
    return Transformer(model, length)


def torchao(name: str, scheme: str, length: int, layers: int | None) -> Transformer:
    from torchao import quantization

    configs = {
        "int4": lambda: quantization.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=quantization.granularity.PerGroup(128)
        ),
        "int8": quantization.Int8WeightOnlyConfig,
        "int8-dyn": quantization.Int8DynamicActivationInt8WeightConfig,
    }
    model = model_of(name, layers)
    quantization.quantize_(model, configs[scheme]())
    return Transformer(model, length)


LIBRARIES: dict[str, Callable[[str, str, int, int | None], Any]] = {
    "torch": plain,
    "bitport": own,
    "torchao": torchao,
    "llama.cpp": LlamaCpp,
}
