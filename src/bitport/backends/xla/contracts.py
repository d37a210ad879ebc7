"""The two ops with an external contract, in JAX: quantized_matmul and int4pack_mm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from bitport.backends.xla.encode import encode, rows_of
from bitport.backends.xla.products import STRAIGHT, TURNED, dot, finish, grouped_sum
from bitport.layouts.tile_packed import SHIFTS
from bitport.numerics import ACTIVATIONS


def quantized_matmul(
    x: Array,
    w: Array,
    scaler: Array,
    zero_point: Array | None = None,
    block_size: int | None = -1,
    int4_weight: bool | None = False,
    quantize_activation: bool | None = False,
) -> Array:
    """See bitport.ops.quantized_matmul. With blocks, w is [C, b, N], and the products of the blocks are added."""
    codes = w.T[None] if w.ndim == 2 else w  # [C, b, N]
    chunks, size, n = codes.shape
    scaler = scaler.astype(jnp.float32).reshape(chunks, n)
    shift = None if zero_point is None else zero_point.astype(jnp.float32).reshape(chunks, n)
    flat = rows_of(x)
    if int4_weight:
        codes = codes.astype(jnp.int4)
    if quantize_activation:
        encoded = encode(flat, ACTIVATIONS["int8"])
        rows = (encoded.codes ^ 0x80).view(jnp.int8)
        y = grouped_sum(rows, codes.reshape(-1, n), scaler, None, size)
        if shift is not None:
            sums = jnp.sum(rows.reshape(-1, chunks, size), -1, dtype=jnp.int32).astype(jnp.float32)
            y = y - jax.lax.dot(sums, shift, precision=jax.lax.Precision.HIGHEST)
        y = y * encoded.scale
    else:
        value = codes.astype(jnp.float32) * scaler[:, None, :]
        if shift is not None:
            value = value - shift[:, None, :]
        y = dot(flat, value.reshape(chunks * size, n).astype(x.dtype), STRAIGHT)
    return finish(y, x, None)


def int4pack_mm(x: Array, mat2: Array, group: int, scales_and_zeros: Array) -> Array:
    """See bitport.ops.int4pack_mm; the order of codes in mat2 is in bitport.layouts.tile_packed."""
    codes = unpack_tiles(mat2).astype(jnp.float32) - 8
    n, k = codes.shape
    scale, zero = (jnp.moveaxis(scales_and_zeros, -1, 0).astype(jnp.float32)).swapaxes(1, 2)  # each [N, K/g]
    value = codes.reshape(n, -1, group) * scale[..., None] + zero[..., None]
    weight = value.reshape(n, k).astype(x.dtype)
    return dot(x, weight, TURNED).astype(x.dtype)


def unpack_tiles(data: Array) -> Array:
    tiles, outer, _, pairs = data.shape
    columns = jnp.stack([(data >> shift) & 0xF for shift in SHIFTS], -1)
    parts = columns.reshape(tiles, outer, 8, 4, pairs, 4, 2).transpose(0, 2, 1, 4, 5, 3, 6)
    return parts.reshape(8 * tiles, 32 * outer * pairs)
