"""A Hugging Face causal language model as methods of a program: ``prefill`` for a prompt, ``decode`` for one token.

Both take (ids [1, n], positions [n], keys and values of each layer [1, heads, capacity, size]) and return the logits
[1, vocabulary] after the last id. Keys and values of these positions are written into the caches, which the caller
owns. Those of a quantized cache are codes, scales and perhaps zeros, each [1, heads, capacity, their size].
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bitport.cache.static import static_format
from bitport.errors import ArgumentError, ExportError
from bitport.export import Method
from bitport.integrations.cache_name import cache_of, with_cache
from bitport.integrations.huggingface import positions_of, text_config

LONGEST = 2048
"""Default maximum for the positions of the cache, limited to what the model supports."""
SAMPLE = 5
"""Number of ids in the recorded prompt."""


class Given:
    """One layer of a cache in preallocated memory, with the interface of transformers."""

    is_compileable, is_sliding, is_initialized, supports_early_init = True, False, True, True

    def __init__(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        self.keys, self.values, self.positions = keys, values, positions

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.positions, keys)
        self.values.index_copy_(2, self.positions, values)
        return self.keys, self.values


KEYS_AND_VALUES = {"DynamicCache", "DynamicLayer", "DynamicSlidingWindowLayer"}
"""Class names in transformers of a cache whose state is keys and values only, and of its layers."""
ONLY = "only models with full attention and keys and values as their state can be exported so"


def cache_in(layers: Sequence[Any]) -> Any:
    """A cache of ``layers``. Its length is not available as a number: a program gets it as data, the positions."""
    from transformers.cache_utils import Cache

    def get_seq_length(*args: Any) -> int:
        raise ExportError(f"this model asks its cache how many positions it holds, which is data in a program: {ONLY}")

    cache: Any = Cache(layers=list(layers))
    cache.get_seq_length = get_seq_length
    return cache


def last_logits(model: Any, ids: Tensor, positions: Tensor, length: Any, layers: Sequence[Any]) -> Tensor:
    """The logits [1, vocabulary] after the last of ``ids``, with a cache of ``layers`` of ``length`` positions, of
    which each id sees those up to its own."""
    seen = (torch.arange(length, device=ids.device) <= positions[:, None])[None, None]
    if text_config(model)._attn_implementation == "eager":  # which adds a mask to the scores
        seen = torch.where(seen, 0.0, torch.finfo(model.dtype).min).to(model.dtype)
    # Earlier versions of transformers count what is in the cache unless they are told.
    told = {"cache_position": positions} if "cache_position" in inspect.signature(model.forward).parameters else {}
    result = model(
        input_ids=ids,
        attention_mask=seen,
        position_ids=positions[None],
        **with_cache(model, cache_in(layers)),
        use_cache=True,
        logits_to_keep=1,
        **told,
    )
    return result.logits[:, -1]


class WithCache(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def layers(self, cache: Sequence[Tensor], positions: Tensor) -> list[Any]:
        return [Given(*pair, positions) for pair in zip(cache[::2], cache[1::2], strict=True)]

    def forward(self, ids: Tensor, positions: Tensor, cache: list[Tensor]) -> Tensor:
        return last_logits(self.model, ids, positions, cache[0].shape[2], self.layers(cache, positions))


def causal_lm(
    model: Any, capacity: int | None = None, *, kv_cache: str | None = None
) -> tuple[dict[str, Method], dict[str, Any]]:
    """Return the methods, and metadata for users of the program. ``capacity``: positions of the cache. ``kv_cache``:
    the format of a quantized one, such as "int8" (docs/kv-cache.md). The attention of ``model`` is switched to that
    which reads the cache in place."""
    from bitport.integrations.program_cache import WithStores

    format = None if kv_cache is None else static_format(kv_cache)
    capacity = fits(model, capacity)
    ids, states, logits = sample_of(model, SAMPLE)
    positions = torch.arange(SAMPLE)
    with torch.no_grad():
        check_logits(WithCache(model).eval()(ids, positions, empty_cache(states, capacity)), logits)
    module = WithStores(model, format, states).eval()
    cache = module.empty_cache(capacity)
    length = torch.export.Dim("length", min=2, max=capacity)
    methods = {
        "prefill": Method(module, (ids, positions, cache), ({1: length}, {0: length}, [None] * len(cache))),
        "decode": Method(module, (ids[:, -1:], torch.tensor([0]), cache)),
    }
    ends = model.generation_config.eos_token_id  # of a model that chats often more than its config names
    return methods, {"kind": "causal-lm", "capacity": capacity, "eos": ends, "kv_cache": kv_cache}


def windows(model: Any) -> list[int]:
    """The window of each layer with sliding-window attention. Up to that length it equals full attention."""
    from transformers.cache_utils import DynamicCache

    layers: list[Any] = DynamicCache(config=model.config).layers
    return [layer.sliding_window for layer in layers if getattr(layer, "is_sliding", False)]


def fits(model: Any, capacity: int | None) -> int:
    """The capacity of a cache: as requested, if the model supports it and no sliding window is shorter."""
    narrow = windows(model)
    known = min([positions_of(model) or LONGEST, *narrow])
    capacity = min(known, LONGEST) if capacity is None else capacity
    if not SAMPLE < capacity <= known:
        why = ", without a sliding window, which is not exported" if known in narrow else ""
        raise ArgumentError(
            f"a cache of {capacity} positions: give {SAMPLE + 1} to {known}, which the model supports{why}"
        )
    return capacity


def sample_of(model: Any, count: int) -> tuple[Tensor, list[Tensor], Tensor]:
    """``count`` ids, keys and values of each layer after them, and the logits after the last."""
    ids = torch.arange(count)[None] % text_config(model).vocab_size
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=True)
    cache = cache_of(whole)
    layers = cache.layers
    if other := {type(cache).__name__, *(type(layer).__name__ for layer in layers)} - KEYS_AND_VALUES:
        raise ExportError(f"this model keeps what it has seen as {', '.join(sorted(other))}: {ONLY}")
    return ids, [part for layer in layers for part in (layer.keys, layer.values)], whole.logits[:, -1]


def empty_cache(states: Sequence[Tensor], capacity: int) -> list[Tensor]:
    """Zeros in place of ``states``, with room for ``capacity`` positions."""
    return [part.new_zeros(1, part.shape[1], capacity, part.shape[3]) for part in states]


def check_logits(logits: Tensor, wanted: Tensor) -> None:
    """ExportError if the logits differ, as for models with partial attention or another kind of state."""
    off = float((logits.double() - wanted.double()).abs().max())
    allowed = float(wanted.double().abs().max()) * torch.finfo(wanted.dtype).eps ** 0.5
    if not off <= allowed:
        raise ExportError(
            f"with its cache in given tensors this model computes something else (logits {off:.3g} off): {ONLY}"
        )
