"""Quantize in JAX: choose scales and round values as bitport.numerics does, step by step in float32.

XLA's simplifier replaces division by a constant or a broadcast with multiplication by its rounded reciprocal;
:func:`divide` hides the divisor from it.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array

from bitport.backends.xla.decode import decode, decode_float, jax_dtype, pack_bits
from bitport.numerics import ACTIVATIONS, Format, NumberType, number_type
from bitport.numerics.codebooks import midpoints, zero_code
from bitport.numerics.codec import has_whole_zero
from bitport.numerics.format import FLOAT8_SCALES
from bitport.numerics.qparams import fraction_of_max, global_scale_range, scale_range

E4M3, E8M0 = number_type("float8_e4m3"), number_type("float8_e8m0")


class Encoded(NamedTuple):
    """uint8 codes [..., N, K] and their scales and zeros; 8-bit scales are bytes."""

    codes: Array
    scale: Array
    zero: Array | None
    scale2: Array | None


def divide(x: Array, divisor: Array | float) -> Array:
    """Return x / divisor, correctly rounded."""
    spread_out = jnp.broadcast_to(jnp.asarray(divisor, x.dtype), x.shape)
    return x / jax.lax.optimization_barrier(spread_out)


def to_blocks(x: Array, fmt: Format) -> Array:
    """Reshape [..., N, K] to [..., SN, bn, SK, bk]; short edge blocks are padded with zeros."""
    n, k = x.shape[-2:]
    bn, bk = fmt.block_shape(n, k)
    sn, sk = fmt.scale_shape(n, k)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, sn * bn - n), (0, sk * bk - k)])
    return x.reshape(*x.shape[:-2], sn, bn, sk, bk)


def from_blocks(x: Array, n: int, k: int) -> Array:
    *leading, sn, bn, sk, bk = x.shape
    return x.reshape(*leading, sn * bn, sk * bk)[..., :n, :k]


def _spread(part: Array) -> Array:
    return part[..., :, None, :, None]


def encode_float(x: Array, number: NumberType) -> Array:
    """Encode float32 as uint8 codes, ties to even, overflow to the largest value."""
    if number.storage != torch.uint8:
        kind = jax_dtype(number.storage)
        return jax.lax.bitcast_convert_type(jnp.clip(x, -number.max, number.max).astype(kind), jnp.uint8)
    values = [number.float_value(code) for code in range(number.max_code + 1)]
    codes = jnp.zeros(x.shape, jnp.uint8)
    for code, (low, high) in enumerate(itertools.pairwise(values)):
        middle = (low + high) / 2
        codes = codes + (jnp.abs(x) >= middle if code % 2 else jnp.abs(x) > middle)
    codes = codes | (jnp.signbit(x).astype(jnp.uint8) << (number.bits - 1))
    return jnp.where(jnp.isnan(x), number.nan_code, codes).astype(jnp.uint8)


def encode_codebook(x: Array, table: tuple[float, ...]) -> Array:
    codes = sum((x > threshold).astype(jnp.uint8) for threshold in midpoints(table))
    return jnp.where(jnp.isnan(x), zero_code(table), codes).astype(jnp.uint8)


def quantize_codes(x: Array, fmt: Format, scale: Array, zero: Array | None, scale2: Array | None) -> Array:
    """Return uint8 codes [..., N, K] of x [..., N, K] with given scales (bytes are decoded by their format)."""
    number, (n, k) = fmt.number, x.shape[-2:]
    factor = _spread(block_scale(fmt, scale, scale2))
    blocks = to_blocks(x.astype(jnp.float32), fmt)
    steps = jnp.where(blocks == 0, blocks, divide(blocks, factor))  # XLA reads 2^-127, the scale of zeros, as 0
    if number.kind == "float":
        codes = encode_float(steps, number)
        return from_blocks(jnp.where(jnp.isnan(factor), number.nan_code, codes).astype(jnp.uint8), n, k)
    if number.kind == "codebook":
        return from_blocks(encode_codebook(steps, number.table), n, k)
    offset = jnp.float32(number.midpoint) if zero is None else _spread(zero.astype(jnp.float32))
    rounded = jnp.round(steps) + offset if has_whole_zero(fmt) else jnp.round(steps + offset)
    codes = jnp.clip(jnp.where(jnp.isnan(rounded), offset, rounded), 0, number.qmax)
    return from_blocks(codes.astype(jnp.uint8), n, k)


def dequantize_codes(fmt: Format, encoded: Encoded) -> Array:
    number, (n, k) = fmt.number, encoded.codes.shape[-2:]
    value = decode(to_blocks(encoded.codes, fmt), number)
    if number.kind == "int":
        value = value - (number.midpoint if encoded.zero is None else _spread(encoded.zero.astype(jnp.float32)))
    return from_blocks(value * _spread(block_scale(fmt, encoded.scale, encoded.scale2)), n, k)


def block_scale(fmt: Format, scale: Array, scale2: Array | None) -> Array:
    """Return the float32 factor of each block."""
    if fmt.scale in FLOAT8_SCALES:
        scale = decode_float(scale, E8M0 if fmt.scale == "e8m0" else E4M3)
    scale = scale.astype(jnp.float32)
    return scale if scale2 is None else scale * scale2


def encode(x: Array, fmt: Format, scale: Array | None = None, scale2: Array | None = None) -> Encoded:
    """Quantize x [..., N, K] to ``fmt``; a given scale, or scale2 alone, is used unchanged."""
    zero = None
    if scale is None:
        scale, zero, scale2 = choose_qparams(x, fmt, scale2)
    return Encoded(quantize_codes(x, fmt, scale, zero, scale2), scale, zero, scale2)


def storage(encoded: Encoded, number: NumberType) -> Array:
    """Return the codes as bytes of the plain layout."""
    return pack_bits(encoded.codes, number.bits)


# -- scales ----------------------------------------------------------------------------------------------------------


def choose_qparams(x: Array, fmt: Format, scale2: Array | None = None) -> tuple[Array, Array | None, Array | None]:
    if fmt.zero != "none":
        return (*_affine(x, fmt), None)
    amax = jnp.max(jnp.abs(to_blocks(x, fmt)), (-3, -1), initial=0).astype(jnp.float32)
    if fmt.global_scale and scale2 is None:
        scale2 = _global_scale(amax, fmt)
    if fmt.scale == "e8m0":
        return _power_of_two(amax, fmt), None, None
    raw = divide(amax, fmt.number.max)
    if fmt.scale == "e4m3":
        raw = raw if scale2 is None else divide(raw, scale2)
        scale = _defined(jnp.clip(raw, E4M3.smallest, E4M3.max), amax, fmt)
        return encode_float(scale, E4M3), None, scale2
    return _stored(raw, amax, fmt.number.max, x.dtype, fmt), None, None


def _defined(scale: Array, amax: Array, fmt: Format) -> Array:
    scale = jnp.where(amax == 0, 1.0 if fmt.number.has_zero or fmt.zero != "none" else 0.0, scale)
    return jnp.where(jnp.isfinite(amax), scale, jnp.nan)


def _stored(raw: Array, amax: Array, largest: float, given: np.dtype, fmt: Format) -> Array:
    dtype = jnp.dtype(given if fmt.scale == "input" else fmt.scale)
    lowest, highest = scale_range(getattr(torch, dtype.name), getattr(torch, given.name), largest)
    return _defined(jnp.clip(raw, lowest, highest), amax, fmt).astype(dtype)


def _affine(x: Array, fmt: Format) -> tuple[Array, Array]:
    steps = fmt.number.qmax
    blocked = to_blocks(x, fmt)
    low = jnp.min(blocked, (-3, -1), initial=0).astype(jnp.float32)
    high = jnp.max(blocked, (-3, -1), initial=0).astype(jnp.float32)
    amax = jnp.maximum(high, -low)
    end = float(jnp.finfo(x.dtype).max) * (steps / (steps + 2))
    low, high = jnp.maximum(low, -end), jnp.minimum(high, end)
    scale = _stored(divide(high / 2 - low / 2, steps / 2), amax, 1.0, x.dtype, fmt)
    zero = divide(-low, scale.astype(jnp.float32))
    zero = jnp.where(jnp.isnan(zero), 0, jnp.clip(zero, 0, steps))
    zero = jnp.where(amax == 0, (steps + 1) // 2, zero)
    return scale, jnp.round(zero).astype(jnp.uint8) if fmt.zero == "int" else zero.astype(scale.dtype)


def _global_scale(amax: Array, fmt: Format) -> Array:
    largest = E4M3.max * fmt.number.max
    lowest, highest = global_scale_range(fmt.number)
    amax = jnp.max(jnp.where(jnp.isfinite(amax), amax, 0), (-2, -1), keepdims=True, initial=0)
    return jnp.where(amax == 0, 1.0, jnp.clip(divide(amax, largest), lowest, highest))


def _power_of_two(amax: Array, fmt: Format) -> Array:
    """Return e8m0 bytes from the bits of amax; see bitport.numerics.qparams.power_of_two_scale."""
    number = fmt.number
    bits = jax.lax.bitcast_convert_type(amax, jnp.int32)
    position = jnp.where(bits < 0x800000, jnp.maximum(bits - 0x400000, 0) * 2, bits)
    exponent, fraction = position >> 23, position & 0x7FFFFF
    if fmt.scale_rule == "even":
        exponent = exponent + ((fraction + (1 << (22 - number.mantissa_bits))) >> 23)
    elif fmt.scale_rule != "floor":
        largest = fraction_of_max(number) if fmt.scale_rule == "rceil" else 0
        exponent = exponent + (fraction > largest)
    code = jnp.clip(exponent - number.emax, 0, 254 - number.emax)
    return jnp.where(jnp.isfinite(amax), code, E8M0.nan_code).astype(jnp.uint8)


def encode_rows(x: Array, act: str, act_scale: Array | None) -> Encoded:
    """Quantize x, seen as [M, K], to ACTIVATIONS[act]. ``act_scale`` fixes the scale that all of x shares."""
    fmt, single = ACTIVATIONS[act], None if act_scale is None else act_scale.reshape(1, 1)
    return encode(rows_of(x), fmt, scale2=single) if fmt.global_scale else encode(rows_of(x), fmt, single)


def rows_of(x: Array) -> Array:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
