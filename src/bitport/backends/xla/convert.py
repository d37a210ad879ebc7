"""embedding, dequantize, quantize, quantize_input and repack in JAX."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from bitport.backends.xla.decode import (
    JaxWeight,
    as_bytes,
    dense,
    jax_dtype,
    pack_bits,
    signed_k_major,
    unpack_bits,
    unread,
)
from bitport.backends.xla.encode import encode, encode_rows, storage
from bitport.backends.xla.k_major import NAME
from bitport.errors import ArgumentError
from bitport.numerics import ACTIVATIONS
from bitport.ops.convert import parse_format


def embedding(ids: Array, *rest: Any) -> Array:
    """Gather the rows ``ids`` from the parts, then dequantize them; the scales of row i are scale[i // block_n]. A
    compiled program cannot raise an error: an id outside the table gives NaN."""
    *parts, out_dtype = rest
    weight, flat = JaxWeight(*parts), ids.reshape(-1)
    axis = 1 if weight.layout == NAME else 0  # the one along N
    blocks = flat // weight.block_n

    def take(part: Array, at: Array) -> Array:
        return jnp.take(part, at, axis=axis, mode="clip")

    if weight.layout == NAME and weight.dtype == "int4" and weight.data.dtype == jnp.uint8:
        codes = (take(weight.data, flat // 2) >> (4 * (flat % 2)).astype(jnp.uint8)) & 0xF
        data = ((codes ^ 8).astype(jnp.int16) - 8).astype(jnp.int8)
    else:
        data = take(weight.data if axis else as_bytes(weight.data), flat)
    picked = weight._replace(
        data=data,
        scale=take(weight.scale, blocks),
        zero=None if weight.zero is None else take(weight.zero, blocks),
        n=flat.shape[0],
        block_n=1,
    )
    inside = (flat >= 0) & (flat < weight.n)
    value = jnp.where(inside[:, None], dense(*picked), jnp.nan)
    return value.astype(jax_dtype(out_dtype)).reshape(*ids.shape, weight.k)


def dequantize(*args: Any) -> Array:
    *parts, out_dtype = args
    return dense(*parts).astype(jax_dtype(out_dtype))


def _listed(data: Array, scale: Array, zero: Array | None, scale2: Array | None) -> list[Array]:
    """Return parts as bitport's ops do: missing ones are empty arrays."""
    return [jnp.zeros(0, data.dtype) if part is None else part for part in (data, scale, zero, scale2)]


def quantize(value: Array, fmt: str) -> list[Array]:
    made = parse_format(fmt)
    encoded = encode(value, made)
    return _listed(storage(encoded, made.number), *encoded[1:])


def quantize_input(x: Array, act: str, act_scale: Array | None) -> list[Array]:
    encoded = encode_rows(x, act, act_scale)
    return _listed(storage(encoded, ACTIVATIONS[act].number), *encoded[1:])


def repack(*args: Any) -> list[Array]:
    """Convert between plain and k_major, the layouts that XLA has kernels for."""
    *parts, target = args
    weight = JaxWeight(*parts)
    if reason := unread(weight.layout, target):
        raise ArgumentError(reason)
    if weight.layout == target:
        return _listed(*weight[:4])
    if weight.dtype not in ("int4", "int8"):
        raise ArgumentError(f"{NAME} holds int4 and int8, not {weight.dtype}")
    bits, flip = weight.number.bits, 1 << (weight.number.bits - 1)
    if target == NAME:
        codes = jnp.swapaxes(unpack_bits(as_bytes(weight.data), bits, weight.k), -1, -2) ^ flip
        data = pack_bits(codes, 4) if bits == 4 else codes.view(jnp.int8)
    else:
        codes = signed_k_major(weight).astype(jnp.int8).view(jnp.uint8) & weight.number.qmax
        data = pack_bits(jnp.swapaxes(codes ^ flip, -1, -2), bits)
    zero = None if weight.zero is None else jnp.swapaxes(weight.zero, -1, -2)
    return _listed(data, jnp.swapaxes(weight.scale, -1, -2), zero, weight.scale2)
