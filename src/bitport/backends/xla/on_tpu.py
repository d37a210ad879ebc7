"""Use the Pallas kernel for a k_major weight if a program is compiled for a TPU and the sizes fit; otherwise plain JAX.

XLA cannot split a Pallas kernel over devices, and reports an error: a sharded weight goes through
:mod:`bitport.backends.xla.shard`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from bitport.backends.xla.decode import JaxWeight, scale_values, signed_k_major
from bitport.backends.xla.pallas_matmul import Tiles, matmul, tiles


def or_else(plain: Callable[..., Array], x: Array, weight: JaxWeight) -> Array:
    """Multiply x [M, K] (float, or int8 codes) with the kernel of the platform, to float32 [M, N]; ``plain`` takes x
    and the weight's data, scale and zero."""
    shape = fits(x, weight)
    if isinstance(shape, str):
        return plain(x, weight.data, weight.scale, weight.zero)

    def kernel(x: Array, data: Array, scale: Array, zero: Array | None) -> Array:
        given = weight._replace(data=data)
        shift = None if zero is None else zero.astype(jnp.float32) - weight.number.midpoint
        return matmul(
            x,
            signed_k_major(given),
            scale_values(scale, None),
            shift,
            group=weight.block_k,
            shape=shape,
            out_dtype=jnp.float32,
        )

    return jax.lax.platform_dependent(x, weight.data, weight.scale, weight.zero, tpu=kernel, default=plain)


def fits(x: Array, weight: JaxWeight) -> Tiles | str:
    """Return the block sizes of the kernel, or why it cannot take this product."""
    if weight.block_n != 1:
        return f"scales must be per row of W, not per {weight.block_n} of them"
    if x.shape[0] == 0:
        return "x has no rows"
    return tiles(x.shape[0], weight.n, weight.k, weight.block_k)
