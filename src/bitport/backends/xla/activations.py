"""linear_then and dyn_linear_then in JAX: the product in x's dtype, then the function, as in the generic kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from bitport.backends.xla import products

FOLLOWING: dict[str, Callable[[Array], Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
}


def linear_then(x: Array, *rest: Any) -> Array:
    *args, then, times = rest
    return _followed(products.linear(x, *args), then, times)


def dyn_linear_then(x: Array, *rest: Any) -> Array:
    *args, then, times = rest
    return _followed(products.dyn_linear(x, *args), then, times)


def _followed(y: Array, then: str, times: Array | None) -> Array:
    y = FOLLOWING[then](y.astype("float32")).astype(y.dtype)
    return y if times is None else y * times
