"""The cache of keys and values in the methods of a program, quantized or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from bitport.cache import CacheFormat, StaticStore
from bitport.cache.static import StaticFloats
from bitport.integrations.cache_attention import in_static
from bitport.integrations.huggingface import text_config
from bitport.integrations.kv_cache import read_in_place
from bitport.integrations.program import Given, WithCache


class Stored(Given):
    """One layer of it. ``config``: of the decoder, which names its attention."""

    def __init__(self, store: StaticStore | StaticFloats, positions: Tensor, config: Any) -> None:
        self.store, self.positions, self.config = store, positions, config

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.store.write(keys, values, self.positions)
        return in_static(self.store, self.positions, self.config)


class WithStores(WithCache):
    """``format``: None for floats. ``states``: keys and values of each layer, of any length."""

    def __init__(self, model: Any, format: CacheFormat | None, states: Sequence[Tensor]) -> None:
        super().__init__(read_in_place(model))
        self.format, none = format, [part[:1, :, :0] for part in states]
        self.like = [*zip(none[::2], none[1::2], strict=True)]

    def _store(self) -> StaticStore | StaticFloats:
        return StaticFloats() if self.format is None else StaticStore(self.format)

    def empty_cache(self, capacity: int) -> list[Tensor]:
        return [part for like in self.like for part in self._store().zeros(*like, capacity)]

    def layers(self, cache: Sequence[Tensor], positions: Tensor) -> list[Any]:
        config, count = text_config(self.model), len(cache) // len(self.like)
        found = []
        for at, (keys, values) in enumerate(self.like):
            store = self._store()
            store.hold(cache[at * count : (at + 1) * count], keys.shape[3], values.shape[3], keys.dtype)
            found.append(Stored(store, positions, config))
        return found
