"""attention in JAX: keys and values are dequantized; scores and sums are float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from bitport.backends.xla.decode import JaxWeight, dense


def attention(q: Array, *rest: Any) -> Array:
    *parts, dense_keys, dense_values, first, mask, causal, scale = rest
    keys = _joined(JaxWeight(*parts[:10]), dense_keys, first)
    values = _joined(JaxWeight(*parts[10:]), dense_values, first)
    batch, heads, rows, width = q.shape
    groups, tokens = keys.shape[1:3]
    queries = q.astype(jnp.float32).reshape(batch, groups, heads // groups, rows, width)
    highest = jax.lax.Precision.HIGHEST
    score = jnp.einsum("bgmrw,bgtw->bgmrt", queries, keys, precision=highest) * (
        width**-0.5 if scale is None else scale
    )
    score = score.reshape(batch, heads, rows, tokens)
    seen = jnp.ones((1, 1, rows, tokens), bool)
    if causal:
        seen = jnp.tril(seen, tokens - rows)
    if mask is not None and mask.dtype == jnp.bool_:
        seen = seen & mask
    elif mask is not None:
        score = score + mask.astype(jnp.float32)
    score = jnp.where(seen, score, -jnp.inf)
    most = score.max(-1, keepdims=True)
    weights = jnp.exp(score - jnp.where(most == -jnp.inf, 0, most))
    total = weights.sum(-1, keepdims=True)
    weights = weights / jnp.where(total == 0, 1, total)  # rows that see no token give zeros
    grouped = weights.reshape(batch, groups, heads // groups, rows, tokens)
    y = jnp.einsum("bgmrt,bgtw->bgmrw", grouped, values, precision=highest)
    return y.reshape(batch, heads, rows, values.shape[-1]).astype(q.dtype)


def _joined(weight: JaxWeight, floats: Array | None, first: int) -> Array:
    """Return all tokens in sequence order, float32 [batch, heads, tokens, width]."""
    packed = dense(*weight).astype(jnp.float32)
    if floats is None:
        return packed
    floats = floats.astype(jnp.float32)
    return jnp.concatenate([floats[:, :, :first], packed, floats[:, :, first:]], 2)
