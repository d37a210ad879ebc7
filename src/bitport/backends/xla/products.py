"""linear, dyn_linear and their grouped variants in JAX.

Sums are float32, or int32 if both operands are integers (XLA's default is to add int8 products in int8). float32
operands are multiplied in full precision (HIGHEST), where a TPU would round them to bfloat16.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from bitport.backends.xla import on_tpu
from bitport.backends.xla.decode import (
    JaxWeight,
    codes_of,
    dense,
    dense_k_major,
    scale_values,
    signed_k_major,
    spread,
)
from bitport.backends.xla.encode import dequantize_codes, encode_rows, rows_of
from bitport.backends.xla.k_major import NAME
from bitport.numerics import ACTIVATIONS

TURNED = (((1,), (1,)), ((), ()))  # x [M, K], w [N, K]
STRAIGHT = (((1,), (0,)), ((), ()))  # x [M, K], w [K, N]
LONGEST_INT = 1 << 16
"""Most columns whose products of int8 are summed in int32: even 2^16 of -128 * -128 make only 2^30."""


def dot(x: Array, w: Array, dims: Any) -> Array:
    highest = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(x, w, dims, precision=highest, preferred_element_type=jnp.float32)


def finish(y: Array, x: Array, bias: Array | None) -> Array:
    """Add the bias in float32; return the result in x's dtype and leading dimensions."""
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(x.dtype).reshape(*x.shape[:-1], y.shape[-1])


def linear(x: Array, *rest: Any) -> Array:
    *parts, bias = rest
    return finish(product(rows_of(x), JaxWeight(*parts)), x, bias)


def product(x: Array, weight: JaxWeight) -> Array:
    """Multiply x [M, K] by W rounded to x's dtype; return float32 [M, N]."""
    if weight.layout != NAME:
        return dot(x, dense(*weight).astype(x.dtype), TURNED)

    def plain(x: Array, data: Array, scale: Array, zero: Array | None) -> Array:
        given = weight._replace(data=data, scale=scale, zero=zero)
        if weight.dtype == "int4" and data.dtype == jnp.uint8 and weight.block_n == 1:
            sums = [dot(x, dense_k_major(half).astype(x.dtype), STRAIGHT) for half in halves(given)]
            return jnp.stack(sums, -1).reshape(x.shape[0], weight.n)
        return dot(x, dense_k_major(given).astype(x.dtype), STRAIGHT)

    return on_tpu.or_else(plain, x, weight)


def halves(weight: JaxWeight) -> tuple[JaxWeight, JaxWeight]:
    """Split k_major int4 bytes into even and odd columns, the low and high nibbles: a CPU unpacks them with vector
    instructions as long as it need not interleave them."""
    codes = jax.lax.bitcast_convert_type(weight.data, jnp.int8)

    def half(data: Array, first: int) -> JaxWeight:
        zero = None if weight.zero is None else weight.zero[:, first::2]
        return weight._replace(data=data, scale=weight.scale[:, first::2], zero=zero, n=weight.n // 2)

    return half((codes << 4) >> 4, 0), half(codes >> 4, 1)


def dyn_linear(x: Array, *rest: Any) -> Array:
    *parts, act, act_scale, bias = rest
    weight = JaxWeight(*parts)
    if multiplies_integers(weight, act):
        return finish(_integer_product(x, weight, act, act_scale), x, bias)
    rounded = fake_quantize(x, act, act_scale)
    return finish(dot(rows_of(rounded), dense(*parts), TURNED), x, bias)


def fake_quantize(x: Array, act: str, act_scale: Array | None = None) -> Array:
    """Round x to ACTIVATIONS[act]; return float32 of its shape."""
    return dequantize_codes(ACTIVATIONS[act], encode_rows(x, act, act_scale)).reshape(x.shape)


# -- integers times integers -----------------------------------------------------------------------------------------


def multiplies_integers(weight: JaxWeight, act: str) -> bool:
    """Whether the sums can be int32: both operands are codes relative to an integer, with one scale per row of x."""
    fmt = ACTIVATIONS[act]
    return (
        fmt.dtype == "int8"
        and fmt.zero == "none"
        and weight.number.kind == "int"
        and weight.number.bits > 1
        and (weight.layout == NAME or weight.data.ndim == 2)
    )


def _integer_product(x: Array, weight: JaxWeight, act: str, act_scale: Array | None) -> Array:
    """Return float32 [M, N]: per group c of K, xs * ws_c * (sum_k xq wq - (zero_c - midpoint) * sum_k xq), summed."""
    encoded = encode_rows(x, act, act_scale)
    xq = (encoded.codes ^ 0x80).view(jnp.int8)

    def plain(xq: Array, data: Array, scale: Array, zero: Array | None) -> Array:
        wq, scale, zero = k_major_integers(weight._replace(data=data, scale=scale, zero=zero))
        return grouped_sum(xq, wq, scale, zero, min(weight.block_k, max(weight.k, 1)))

    y = (
        on_tpu.or_else(plain, xq, weight)
        if weight.layout == NAME
        else plain(xq, weight.data, weight.scale, weight.zero)
    )
    return encoded.scale * y


def k_major_integers(weight: JaxWeight) -> tuple[Array, Array, Array | None]:
    """Return signed codes [K, N], scale [K/g, N] or [K/g, 1], and likewise the zero point relative to the midpoint."""
    if weight.layout == NAME:
        codes, scale, zero = signed_k_major(weight), weight.scale, weight.zero
    else:
        codes = (codes_of(weight).astype(jnp.int16) - int(weight.number.midpoint)).astype(jnp.int8).T
        scale, zero = weight.scale.T, None if weight.zero is None else weight.zero.T
    sideways = weight.matrix._replace(n=1, k=weight.n, block_n=1, block_k=weight.block_n)
    scale = spread(scale_values(scale, weight.scale2), sideways)
    if zero is not None:
        zero = spread(zero.astype(jnp.float32) - weight.number.midpoint, sideways)
    return codes, scale, zero


def grouped_sum(xq: Array, wq: Array, scale: Array, zero: Array | None, group: int) -> Array:
    """Return float32 [M, N]: the sum over groups c of scale[c] * (xq_c wq_c - zero[c] * sum xq_c), group by group, so
    that at most one int32 [M, N] is alive. Sums of more than LONGEST_INT columns are added in float32."""

    def product(x: Array, w: Array, s: Array, z: Array | None) -> Array:
        pieces = [slice(at, at + LONGEST_INT) for at in range(0, max(x.shape[1], 1), LONGEST_INT)]
        return functools.reduce(operator.add, (sums(x[:, here], w[here], z) for here in pieces)) * s

    def sums(x: Array, w: Array, z: Array | None) -> Array:
        exact = jax.lax.dot_general(x, w.astype(jnp.int8), STRAIGHT, preferred_element_type=jnp.int32)
        if z is None:
            return exact.astype(jnp.float32)
        return exact.astype(jnp.float32) - z * jnp.sum(x, 1, dtype=jnp.int32).astype(jnp.float32)[:, None]

    groups = scale.shape[0]
    if groups == 1:
        return product(xq, wq, scale, zero)
    (m, k), n = xq.shape, wq.shape[1]
    xq = jnp.pad(xq, ((0, 0), (0, groups * group - k))).reshape(m, groups, group).transpose(1, 0, 2)
    wq = jnp.pad(wq, ((0, groups * group - k), (0, 0))).reshape(groups, group, n)

    def step(y: Array, part: tuple[Array, Array, Array, Array | None]) -> tuple[Array, None]:
        return y + product(*part), None

    return jax.lax.scan(step, jnp.zeros((m, n), jnp.float32), (xq, wq, scale, zero))[0]


# -- experts ---------------------------------------------------------------------------------------------------------


def by_expert(x: Array, ends: Array, weight: Array) -> Array:
    """Multiply each row of x [T, K] by its expert's matrix of [E, N, K]; rows past the last end give zeros."""
    expert = jnp.searchsorted(ends, jnp.arange(x.shape[0], dtype=ends.dtype), side="right")

    def one(y: Array, part: tuple[Array, Array]) -> tuple[Array, None]:
        at, w = part
        return jnp.where((expert == at)[:, None], dot(x, w, TURNED), y), None

    start = jnp.zeros((x.shape[0], weight.shape[-2]), jnp.float32)
    return jax.lax.scan(one, start, (jnp.arange(weight.shape[0]), weight))[0]


def grouped_linear(x: Array, ends: Array, *parts: Any) -> Array:
    return by_expert(x, ends, dense(*parts).astype(x.dtype)).astype(x.dtype)


def dyn_grouped_linear(x: Array, ends: Array, *rest: Any) -> Array:
    *parts, act = rest
    return by_expert(fake_quantize(x, act), ends, dense(*parts)).astype(x.dtype)
