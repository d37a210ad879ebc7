"""Quantized key-value caches for transformers models::

    model.generate(**inputs, cache=KVCache.of(model, "int8"))  # past_key_values before transformers 5.24
    model.generate(**inputs, cache=StaticKVCache.of(model, "int8", max_cache_len=4096))  # for torch.compile

They are independent of the quantization of weights. Layers whose memory grows with the text are quantized; those with
bounded memory (a sliding window, the state of linear attention) remain transformers' own. A token is read as stored,
even in the step that added it: unless some tokens are kept in float, results do not depend on how a text is split
into steps. No gradient flows through a cache.

With ``attn_implementation`` "bitport", which importing this module registers with transformers, attention reads the
cache in place. Any other implementation is given keys and values as floats, dequantized in each step.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer, StaticCache, StaticLayer

from bitport.cache import CacheFormat, KeyValueStore, StaticStore, cache_format
from bitport.cache.static import static_format
from bitport.errors import ArgumentError
from bitport.integrations.cache_attention import ATTENTION, InStore, in_static
from bitport.integrations.cache_name import with_cache
from bitport.integrations.huggingface import text_config
from bitport.numerics import is_computed

__all__ = ["KVCache", "StaticKVCache"]


class _Stored:
    """A layer of transformers whose keys and values are in ``store``. ``config``: of the decoder, which names its
    attention."""

    store: Any
    config: Any
    is_initialized: bool

    @property
    def keys(self) -> Tensor | None:
        """Dequantized on each access; None if there are none yet."""
        return self.store.dense_keys() if self.is_filled else None

    @keys.setter
    def keys(self, given: Tensor | None) -> None:
        self._refuse(given)

    @property
    def values(self) -> Tensor | None:
        return self.store.dense_values() if self.is_filled else None

    @values.setter
    def values(self, given: Tensor | None) -> None:
        self._refuse(given)

    @property
    def is_filled(self) -> bool:
        return self.is_initialized

    def _refuse(self, given: Tensor | None) -> None:
        """Only accept None, which transformers assigns initially."""
        if given is not None:
            raise ArgumentError("keys and values of a quantized cache cannot be assigned: update() adds tokens to them")


class Layer(_Stored, DynamicLayer):
    """One layer of :class:`KVCache`."""

    def __init__(self, format: CacheFormat, config: Any) -> None:
        super().__init__()
        self.store, self.config = KeyValueStore(format), config

    @property
    def is_filled(self) -> bool:
        return len(self.store) > 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.store.append(key_states, value_states)
        if self.config._attn_implementation == ATTENTION:
            return InStore(self.store, key_states, True), InStore(self.store, value_states, False)
        return self.store.dense_keys(), self.store.dense_values()

    def get_seq_length(self) -> int:
        return len(self.store)

    def crop(self, tokens: int) -> None:
        """Negative: remove that many tokens. Positive, as in earlier versions of transformers: keep at most that
        many."""
        self.store.crop(max(len(self.store) + tokens, 0) if tokens <= 0 else min(tokens, len(self.store)))

    def reset(self) -> None:
        self.store.reset()
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.store.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.store.select(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.store.repeat(repeats)

    def offload(self) -> None:
        self.store.to("cpu")

    def prefetch(self) -> None:
        if self.is_initialized:
            self.store.to(self.device)


class StaticQuantizedLayer(_Stored, StaticLayer):
    """One layer of :class:`StaticKVCache`."""

    def __init__(self, format: CacheFormat, config: Any, max_cache_len: int) -> None:
        self.is_initialized = False
        super().__init__(max_cache_len)
        self.store, self.config = StaticStore(format), config

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if torch.compiler.is_compiling():
            self._allocate(key_states, value_states)
        else:
            with torch.inference_mode(False):  # or torch would forbid to write to it outside that mode
                self._allocate(key_states, value_states)
            for each in (*self.store.parts, self.cumulative_length):  # CUDA graphs write to where it was then
                torch._dynamo.mark_static_address(each)

    def _allocate(self, keys: Tensor, values: Tensor) -> None:
        self.store.allocate(keys, values, self.max_cache_len)
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self.cumulative_length = torch.zeros((), dtype=torch.int64, device=self.device)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        count = key_states.shape[2]
        if is_computed(self.cumulative_length) and self.device.type == "cpu":  # elsewhere it would be waited for
            held = int(self.cumulative_length)
            if held + count > self.max_cache_len:
                raise ArgumentError(
                    f"{count} tokens after {held} do not fit: the cache has max_cache_len={self.max_cache_len}"
                )
        positions = torch.arange(count, device=self.device) + self.cumulative_length
        self.cumulative_length.add_(count)
        self.store.write(key_states, value_states, positions)
        return in_static(self.store, positions, self.config)

    def get_mask_sizes(self, *args: Any) -> tuple[int, int]:
        return self.max_cache_len, 0

    def get_seq_length(self, *args: Any) -> Any:
        return self.cumulative_length if self.is_initialized else 0

    def crop(self, tokens: int) -> None:
        """As :meth:`Layer.crop`."""
        if tokens > 0:
            self.cumulative_length.clamp_(max=tokens)
        else:
            self.cumulative_length.add_(tokens).clamp_(min=0)

    def reset(self) -> None:
        self._change(torch.zeros_like)
        self.cumulative_length.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._change(lambda part: part.index_select(0, beam_idx.to(part.device)))

    def _change(self, what: Callable[[Tensor], Tensor]) -> None:
        """Write ``what`` of each part to where it is."""
        for part in self.store.parts if self.is_initialized else ():
            part.copy_(what(part))

    def offload(self) -> None:
        if self.is_initialized:
            self.store.to("cpu")

    def prefetch(self) -> None:
        if self.is_initialized:
            self.store.to(self.device)


class KVCache(DynamicCache):
    """The quantized cache of a model, for one text or batch. :meth:`of` makes one that the model's attention reads
    in place.

    ``config``: the model's configuration. ``format``: such as "int8" or "int4-g32+last64" (docs/kv-cache.md).
    """

    def __init__(self, config: Any, format: str | CacheFormat = "int8") -> None:
        self.format, decoder = cache_format(format), decoder_of(config, type(self))
        super().__init__(config=config)
        self.layers = quantized(self.layers, decoder, DynamicLayer, lambda: Layer(self.format, decoder))

    @classmethod
    def of(cls, model: Any, format: str | CacheFormat = "int8") -> KVCache:
        """Create a cache for ``model`` and switch its attention to the one that reads it in place. A model that does
        not support "sdpa" (soft-capped scores, sinks) keeps its own attention, which is given floats."""
        cache = cls(getattr(model, "config", model), format)
        read_in_place(check_kind(model))
        return cache

    @property
    def nbytes(self) -> int:
        """Size of the keys and values in quantized layers."""
        return sum(layer.store.nbytes for layer in self.layers if isinstance(layer, Layer))


class StaticKVCache(StaticCache):
    """The quantized cache of a model in memory of a fixed size, for one text or batch at a time: what torch.compile,
    CUDA graphs and torch.export need. :meth:`of` makes one that the model's attention reads in place.

    ``config``: the model's configuration. ``format``: such as "int8" or "int4-g32", of one scale per token or per group
    of a token. ``max_cache_len``: tokens that fit, prompt and answer.
    """

    def __init__(self, config: Any, format: str | CacheFormat = "int8", *, max_cache_len: int) -> None:
        self.format, decoder = static_format(format), decoder_of(config, type(self))
        if not hasattr(max_cache_len, "__index__") or max_cache_len < 1:
            raise ArgumentError(f"max_cache_len must be a number of tokens, at least 1, not {max_cache_len!r}")
        super().__init__(config=config, max_cache_len=max_cache_len)
        make = functools.partial(StaticQuantizedLayer, self.format, decoder, max_cache_len)
        self.layers = quantized(self.layers, decoder, StaticLayer, make)

    @classmethod
    def of(cls, model: Any, format: str | CacheFormat = "int8", *, max_cache_len: int) -> StaticKVCache:
        """Create a cache for ``model`` and switch its attention, as :meth:`KVCache.of` does."""
        cache = cls(getattr(model, "config", model), format, max_cache_len=max_cache_len)
        read_in_place(check_kind(model))
        return cache

    @property
    def nbytes(self) -> int:
        """Size of the memory of quantized layers; 0 before the first tokens."""
        return sum(layer.store.nbytes for layer in self.layers if isinstance(layer, StaticQuantizedLayer))


def decoder_of(config: Any, cache: type) -> Any:
    """The configuration of the decoder in that of a model; ArgumentError if a quantized cache is not for it."""
    if not hasattr(config, "get_text_config"):
        raise ArgumentError(
            f"{cache.__name__} takes the configuration of a model, {cache.__name__}.of(model, ..) a model, "
            f"not {type(config).__name__}"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ArgumentError(
            f"{config.model_type} has an encoder and a decoder; a quantized cache is for decoders alone"
        )
    return config.get_text_config(decoder=True)


def quantized(layers: list[Any], decoder: Any, plain: type, make: Callable[[], _Stored]) -> list[Any]:
    """``layers`` with ``make()`` for each that keeps every token, which transformers makes as ``plain``."""
    named = getattr(decoder, "layer_types", None) or []
    kinds = itertools.chain(named, itertools.repeat("full_attention"))
    found: list[Any] = []
    for layer, kind in zip(layers, kinds, strict=False):
        if type(layer) is plain and kind == "full_attention":
            found.append(make())
        elif isinstance(layer, CacheLayerMixin) and not getattr(layer, "is_sliding", False):
            raise ArgumentError(
                f"{decoder.model_type} has layers that a quantized cache does not know: {kind}, for which this version "
                f"of transformers has {type(layer).__name__}; leave the cache to transformers"
            )
        else:
            found.append(layer)
    if not any(isinstance(layer, _Stored) for layer in found):
        names = ", ".join(sorted({type(layer).__name__ for layer in found}))
        raise ArgumentError(f"no layer of {decoder.model_type} keeps every token: {names} need no quantized cache")
    return found


def check_kind(model: Any) -> Any:
    """``model``; ArgumentError if its class has a cache of its own."""
    takes = getattr(model, "_supports_default_dynamic_cache", None)
    if takes is not None and not takes():
        raise ArgumentError(f"{type(model).__name__} takes only a cache of its own kind; leave it to transformers")
    return model


def read_in_place(model: Any) -> Any:
    """Switch the attention of ``model`` to the one that reads quantized caches. A model that does not support "sdpa"
    (soft-capped scores, sinks) keeps its own attention, which is given floats."""
    decoder = text_config(model)
    plain = model._supports_sdpa and getattr(decoder, "attn_logit_softcapping", None) is None
    if plain and decoder._attn_implementation != ATTENTION:
        model.set_attn_implementation(ATTENTION)
    return model


def logits_of(model: Any, format: str | CacheFormat, *, step: int | None = None) -> Callable[[Tensor], Tensor]:
    """Map token ids [batch, length] to logits [batch, length, vocabulary], using a new cache: ``step`` tokens at a
    time, as in generation, or all at once."""

    def logits(ids: Tensor) -> Tensor:
        cache = KVCache.of(model, format)
        parts = ids.to(model.device).split(step or max(ids.shape[1], 1), 1)
        found = [model(input_ids=part, use_cache=True, **with_cache(model, cache)).logits for part in parts]
        return torch.cat(found, 1).to(ids.device)

    return logits
