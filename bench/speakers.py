"""What can generate text: each reads a prompt, then writes one token after the other. Seconds are returned.

Every torch model runs through the same loop with a static cache, so that eager and compiled differ in nothing else.
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


class Speakers:
    """One model of one library, and the modes in which it can run."""

    def __init__(self, library: str, model: str, scheme: str, length: int) -> None:
        self._of = LIBRARIES[library](model, scheme, length)

    def read(self, mode: str, prompt: list[int]) -> float:
        return float(self._of.read(mode, prompt))

    def write(self, mode: str, tokens: int) -> float:
        return float(self._of.write(mode, tokens))


class Transformer:
    """A transformers model. Compiled, it is the step of one token that is; reading stays eager."""

    def __init__(self, model: Any, length: int) -> None:
        self._model, self._length = model, length
        self._steps = {"eager": model, "compiled": torch.compile(model.forward, dynamic=False)}

    @torch.inference_mode()
    def read(self, mode: str, prompt: list[int]) -> float:
        from transformers import StaticCache

        self._cache = StaticCache(config=self._model.config, max_cache_len=self._length)
        ids = torch.tensor([prompt])
        start = time.perf_counter()
        self._token = self._next(self._model, ids)
        return time.perf_counter() - start

    @torch.inference_mode()
    def write(self, mode: str, tokens: int) -> float:
        step = self._steps[mode]
        start = time.perf_counter()
        for _ in range(tokens):
            self._token = self._next(step, self._token)
        return time.perf_counter() - start

    def _next(self, step: Any, ids: torch.Tensor) -> torch.Tensor:
        found = step(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        chosen: torch.Tensor = found.logits[:, -1].argmax(-1, keepdim=True)
        return chosen


class LlamaCpp:
    def __init__(self, model: str, kind: str, length: int) -> None:
        import llama_cpp

        from bench import gguf_model

        threads = torch.get_num_threads()
        options = {"n_threads": threads, "n_threads_batch": threads, "n_ctx": length, "verbose": False}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            gguf_model.write(path, settings_of(model), kind)
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


def plain(name: str, scheme: str, length: int) -> Transformer:
    return Transformer(model_of(name), length)


def own(name: str, scheme: str, length: int) -> Transformer:
    model = model_of(name)
    bitport.quantize_(model, scheme, measure=False, progress=False)
    return Transformer(model, length)


def torchao(name: str, scheme: str, length: int) -> Transformer:
    from torchao import quantization

    configs = {"int8": "Int8WeightOnlyConfig", "int8-dyn": "Int8DynamicActivationInt8WeightConfig"}
    model = model_of(name)
    quantization.quantize_(model, getattr(quantization, configs[scheme])())
    return Transformer(model, length)


LIBRARIES: dict[str, Callable[[str, str, int], Any]] = {
    "torch": plain,
    "bitport": own,
    "torchao": torchao,
    "llama.cpp": LlamaCpp,
}
