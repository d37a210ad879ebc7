"""The attention "bitport" of transformers, which reads quantized caches in place, and what such caches give a model
instead of floats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from bitport.cache import KeyValueStore, StaticStore
from bitport.cache.static import StaticFloats
from bitport.errors import ArgumentError

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

    def attend(self, q: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Tensor:
        return self.current().attend(q, mask, causal=causal and mask is None, scale=scale)


class InStatic:
    """The keys or values of a static store, whose newest tokens are at ``positions``. No tensor, since torch.compile
    does not trace how one of a class of its own is made; whatever a model does with it is done with floats."""

    def __init__(self, store: StaticStore | StaticFloats, positions: Tensor, is_keys: bool) -> None:
        self.store, self.positions, self.is_keys = store, positions, is_keys

    def dense(self) -> Tensor:
        return self.store.dense_keys() if self.is_keys else self.store.dense_values()

    def attend(self, q: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Tensor:
        if mask is None:
            newest = self.positions if causal else self.positions[-1:]
            mask = (torch.arange(self.store.room, device=q.device) <= newest[:, None])[None, None]
        return self.store.attend(q, mask, scale=scale)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dense(), name)

    def __getitem__(self, at: Any) -> Tensor:
        return self.dense()[at]

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda each: each.dense() if isinstance(each, InStatic) else each, (args, kwargs or {}))
        return func(*args, **kwargs)


def in_static(store: StaticStore | StaticFloats, positions: Tensor, config: Any) -> tuple[Any, Any]:
    """What a cache gives a model after writing to ``positions``: keys and values as floats unless the attention that
    ``config``, of the decoder, names reads the store in place."""
    if config._attn_implementation == ATTENTION:
        return InStatic(store, positions, True), InStatic(store, positions, False)
    return store.dense_keys(), store.dense_values()


def attention(
    module: Any,
    query: Tensor,
    key: Any,
    value: Any,
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
    here = isinstance(key, InStore | InStatic) and isinstance(value, InStore | InStatic) and key.store is value.store
    if not (plain and here):
        key, value = (each.dense() if isinstance(each, InStatic) else each for each in (key, value))
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
        return found
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    y = key.attend(query, attention_mask, is_causal, scaling)
    return y.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
