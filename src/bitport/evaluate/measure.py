"""Size and speed of a model."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch
from torch import Tensor, nn

from bitport.api import explain
from bitport.errors import ArgumentError
from bitport.tensor.sharded import model_nbytes


@dataclasses.dataclass(frozen=True)
class Size:
    nbytes: int
    """Bytes of all parameters, tied ones counted once, scales and zero points included."""
    weights: int
    """Number of elements of all parameters."""

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / max(self.weights, 1)


def size_of(model: nn.Module) -> Size:
    return Size(model_nbytes(model), sum(param.numel() for param in model.parameters()))


def kernels_of(model: nn.Module) -> tuple[str, ...]:
    """Return the kernels that compute the quantized layers for one row; none for a float model."""
    return tuple(dict.fromkeys(layer.decisions[1].kernel for layer in explain(model, (1,)).layers))


@torch.no_grad()
def generation_speed(model: Any, prompt: Tensor, new_tokens: int) -> float:
    """Return tokens per second of greedy generation of ``new_tokens`` after ``prompt`` [1, length], including prefill.
    The prompt must be on the device of ``model``.

    ``model`` has the ``generate`` of transformers. A short warm-up run keeps one-time costs out of the timing.
    """
    if new_tokens < 1:
        raise ArgumentError(f"new_tokens={new_tokens}: at least one token must be generated")
    options = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
    model.generate(prompt, max_new_tokens=2, min_new_tokens=2, **options)
    start = time.perf_counter()
    result = model.generate(prompt, max_new_tokens=new_tokens, min_new_tokens=new_tokens, **options)
    result.tolist()  # waits for the device
    return new_tokens / (time.perf_counter() - start)
