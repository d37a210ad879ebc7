"""A Hugging Face causal language model as the single method of a program: for ONNX Runtime with keys and values as
inputs and outputs, for ExecuTorch with keys and values as state."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from bitport.errors import ExportError
from bitport.export import Method
from bitport.integrations.huggingface import positions_of
from bitport.integrations.program import (
    ONLY,
    SAMPLE,
    Given,
    WithCache,
    check_logits,
    empty_cache,
    fits,
    last_logits,
    sample_of,
    windows,
)


class Growing(Given):
    """One layer of a cache that grows with the sequence."""

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys, self.values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
        return self.keys, self.values


class WithPast(nn.Module):
    """Map (ids [1, n], keys and values of each layer [1, heads, past, size]) to (logits [1, vocabulary] after the last
    id, keys and values [1, heads, past + n, size])."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, past: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        seen, count = past[0].shape[2], ids.shape[1]
        positions = torch.arange(count, device=ids.device) + seen
        layers = [Growing(*pair, positions) for pair in zip(past[::2], past[1::2], strict=True)]
        logits = last_logits(self.model, ids, positions, seen + count, layers)
        return logits, [part for layer in layers for part in (layer.keys, layer.values)]


def with_past(model: Any) -> tuple[Method, list[str], list[str]]:
    """Return the method, and the names of its inputs and outputs."""
    known = positions_of(model)
    if (narrow := windows(model)) and min(narrow) < (known or math.inf):
        raise ExportError(
            f"a layer has a sliding window of {min(narrow)} positions, and an ONNX model has no limit: {ONLY}; a "
            f"package or a program for ExecuTorch can have up to {min(narrow)} positions (--capacity)"
        )
    ids, states, logits = sample_of(model, 2 * SAMPLE)
    module, past = WithPast(model).eval(), [part[:, :, :SAMPLE].contiguous() for part in states]
    with torch.no_grad():
        check_logits(module(ids[:, SAMPLE:], past)[0], logits)
    length, seen = torch.export.Dim("length", min=1, max=known), torch.export.Dim("past", min=0, max=known)
    method = Method(module, (ids[:, SAMPLE:], past), ({1: length}, [{2: seen}] * len(past)))
    names = [f"{layer}.{part}" for layer in range(len(past) // 2) for part in ("key", "value")]
    return method, ["input_ids", *(f"past_key_values.{n}" for n in names)], ["logits", *(f"present.{n}" for n in names)]


class WithState(WithCache):
    """Map (ids [1, n], positions [n]) to the logits [1, vocabulary] after the last id; keys and values are buffers."""

    def __init__(self, model: nn.Module, cache: list[Tensor]) -> None:
        super().__init__(model)
        for at, part in enumerate(cache):
            self.register_buffer(f"cache{at}", part)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        cache = [part for name, part in self.named_buffers(recurse=False) if name.startswith("cache")]
        return super().forward(ids, positions, cache)


def with_state(model: Any, capacity: int | None = None) -> Method:
    capacity = fits(model, capacity)
    ids, states, logits = sample_of(model, SAMPLE)
    module, positions = WithState(model, empty_cache(states, capacity)).eval(), torch.arange(SAMPLE)
    with torch.no_grad():
        check_logits(module(ids, positions), logits)
    for part in module.buffers(recurse=False):
        part.zero_()
    length = torch.export.Dim("length", min=1, max=capacity)
    return Method(module, (ids, positions), ({1: length}, {0: length}))
