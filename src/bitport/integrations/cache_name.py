"""The name that transformers models use for their key-value cache: ``cache`` since 5.24, ``past_key_values`` before;
third-party classes use either."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

from bitport.errors import ArgumentError

NAMES = ("cache", "past_key_values")


def with_cache(model: Any, cache: Any) -> dict[str, Any]:
    """The keyword argument that passes ``cache`` to ``model`` or its generate()."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    taken: Collection[str] = inspect.signature(model.forward).parameters
    if not {*NAMES} & {*taken}:  # a wrapper that forwards all arguments: results use the same name
        taken = CausalLMOutputWithPast.__dataclass_fields__
    return {next(name for name in NAMES if name in taken): cache}


def cache_of(result: Any) -> Any:
    """The cache in the output of a model."""
    found = next((result[name] for name in NAMES if name in result), None)
    if found is None:
        raise ArgumentError(
            f"the model returns no cache of keys and values ({' or '.join(NAMES)}): it must be a decoder, which "
            "generates token by token"
        )
    return found
