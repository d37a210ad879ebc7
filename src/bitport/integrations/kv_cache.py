"""A quantized key-value cache for transformers models::

    model.generate(**inputs, cache=KVCache.of(model, "int8"))  # past_key_values before transformers 5.24

It is independent of the quantization of weights. Layers whose memory grows with the text are quantized; those with
bounded memory (a sliding window, the state of linear attention) remain transformers' own. A token is read as stored,
even in the step that added it: unless some tokens are kept in float, results do not depend on how a text is split
into steps. No gradient flows through the cache.

With ``attn_implementation`` "bitport", which importing this module registers with transformers, attention reads the
cache in place. Any other implementation is given keys and values as floats, dequantized in each step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from bitport.cache import CacheFormat, KeyValueStore, cache_format
from bitport.errors import ArgumentError
from bitport.integrations.cache_name import with_cache
from bitport.integrations.huggingface import text_config

__all__ = ["KVCache"]

ATTENTION = "bitport"
"""The attention that reads the cache in place; with any other cache it is equivalent to "sdpa"."""


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that ``func`` writes to."""
    given = {**dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)), **kwargs}
    writes = (argument for argument in func._schema.arguments if argument.alias_info and argument.alias_info.is_write)
    return [given.get(argument.name) for argument in writes]


class InStore(Tensor):
    """The keys or values of a store, as a model passes them from its cache to its attention. All other computations get
    a dequantized copy, so nothing can be written into them."""

    store: KeyValueStore
    tokens: int
    is_keys: bool

    @staticmethod
    def __new__(cls, store: KeyValueStore, like: Tensor, is_keys: bool) -> InStore:
        shape = (*like.shape[:2], len(store), like.shape[3])
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        made.store, made.tokens, made.is_keys = store, len(store), is_keys
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(each, InStore) for each in tree_leaves(_written(func, args, kwargs))):
            raise ArgumentError(f"{func} would write into keys or values of a quantized cache: give it their clone()")
        args, kwargs = tree_map(lambda each: each.dense() if isinstance(each, InStore) else each, (args, kwargs))
        return func(*args, **kwargs)

    def current(self) -> KeyValueStore:
        if len(self.store) != self.tokens:
            raise ArgumentError(
                f"these are keys or values of a step that ended at token {self.tokens}, and the cache holds "
                f"{len(self.store)} by now; use them before the next step"
            )
        return self.store

    def dense(self) -> Tensor:
        store = self.current()
        return store.dense_keys() if self.is_keys else store.dense_values()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"InStore({'keys' if self.is_keys else 'values'}, {self.store.format})"


class Layer(DynamicLayer):
    """One layer of :class:`KVCache`. ``config``: of the decoder, which names its attention."""

    def __init__(self, format: CacheFormat, config: Any) -> None:
        super().__init__()
        self.store, self.config = KeyValueStore(format), config

    @property
    def keys(self) -> Tensor | None:
        """Dequantized on each access; None if there are none yet."""
        return self.store.dense_keys() if len(self.store) else None

    @keys.setter
    def keys(self, given: Tensor | None) -> None:
        self._refuse(given)

    @property
    def values(self) -> Tensor | None:
        return self.store.dense_values() if len(self.store) else None

    @values.setter
    def values(self, given: Tensor | None) -> None:
        self._refuse(given)

    def _refuse(self, given: Tensor | None) -> None:
        """Only accept None, which transformers assigns initially."""
        if given is not None:
            raise ArgumentError("keys and values of a quantized cache cannot be assigned: update() adds tokens to them")

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


class KVCache(DynamicCache):
    """The quantized cache of a model, for one text or batch. :meth:`of` makes one that the model's attention reads
    in place.

    ``config``: the model's configuration. ``format``: such as "int8" or "int4-g32+last64" (docs/kv-cache.md).
    """

    def __init__(self, config: Any, format: str | CacheFormat = "int8") -> None:
        self.format = cache_format(format)
        if not hasattr(config, "get_text_config"):
            raise ArgumentError(
                f"KVCache takes the configuration of a model, KVCache.of(model, ..) a model, "
                f"not {type(config).__name__}"
            )
        if getattr(config, "is_encoder_decoder", False):
            raise ArgumentError(
                f"{config.model_type} has an encoder and a decoder; a quantized cache is for decoders alone"
            )
        super().__init__(config=config)
        decoder = config.get_text_config(decoder=True)
        named = getattr(decoder, "layer_types", None) or []
        kinds = itertools.chain(named, itertools.repeat("full_attention"))
        self.layers = [self._quantized(layer, kind, decoder) for layer, kind in zip(self.layers, kinds, strict=False)]
        if not any(isinstance(layer, Layer) for layer in self.layers):
            names = ", ".join(sorted({type(layer).__name__ for layer in self.layers}))
            raise ArgumentError(f"no layer of {config.model_type} keeps every token: {names} need no quantized cache")

    @classmethod
    def of(cls, model: Any, format: str | CacheFormat = "int8") -> KVCache:
        """Create a cache for ``model`` and switch its attention to the one that reads it in place. A model that does
        not support "sdpa" (soft-capped scores, sinks) keeps its own attention, which is given floats."""
        cache, decoder = cls(getattr(model, "config", model), format), text_config(model)
        plain = model._supports_sdpa and getattr(decoder, "attn_logit_softcapping", None) is None
        if plain and decoder._attn_implementation != ATTENTION:
            model.set_attn_implementation(ATTENTION)
        return cache

    def _quantized(self, layer: Any, kind: str, decoder: Any) -> Any:
        if type(layer) is DynamicLayer and kind == "full_attention":
            return Layer(self.format, decoder)
        if isinstance(layer, CacheLayerMixin) and not getattr(layer, "is_sliding", False):
            raise ArgumentError(
                f"{decoder.model_type} has layers that a quantized cache does not know: {kind}, for which this version "
                f"of transformers has {type(layer).__name__}; leave past_key_values to transformers"
            )
        return layer

    @property
    def nbytes(self) -> int:
        """Size of the keys and values in quantized layers."""
        return sum(layer.store.nbytes for layer in self.layers if isinstance(layer, Layer))


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention "bitport": reads a store in place, and handles floats like "sdpa"."""
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise ArgumentError(f'the attention "{ATTENTION}" has no {name}: use attn_implementation="eager"')
    plain = not (dropout or kwargs.get("output_attentions")) and kwargs.get("position_bias") is None
    if not (plain and isinstance(key, InStore) and isinstance(value, InStore) and key.store is value.store):
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
        return found
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    causal = is_causal and attention_mask is None
    y = key.current().attend(query, attention_mask, causal=causal, scale=scaling)
    return y.transpose(1, 2).contiguous(), None


def logits_of(model: Any, format: str | CacheFormat, *, step: int | None = None) -> Callable[[Tensor], Tensor]:
    """Map token ids [batch, length] to logits [batch, length, vocabulary], using a new cache: ``step`` tokens at a
    time, as in generation, or all at once."""

    def logits(ids: Tensor) -> Tensor:
        cache = KVCache.of(model, format)
        parts = ids.to(model.device).split(step or max(ids.shape[1], 1), 1)
        found = [model(input_ids=part, use_cache=True, **with_cache(model, cache)).logits for part in parts]
        return torch.cat(found, 1).to(ids.device)

    return logits


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
