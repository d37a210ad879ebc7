"""Decode weights in JAX: from bytes to float32 values.

Data and block scales of 8-bit floats have their own dtypes or, since torchax cannot move those, uint8. The float type
of a scale's bytes follows from scale2: e4m3 with one, e8m0 without. (An e4m3 scale without one gets a scale2 of 1; see
:func:`bitport.backends.xla.move.as_bytes`.)
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array

from bitport.backends.xla.k_major import NAME
from bitport.errors import ArgumentError
from bitport.layouts import Matrix
from bitport.numerics import NumberType, number_type


class JaxWeight(NamedTuple):
    """The ten arguments of a weight (bitport.ops.Weight), with arrays instead of tensors."""

    data: Array
    scale: Array
    zero: Array | None
    scale2: Array | None
    dtype: str
    n: int
    k: int
    block_n: int
    block_k: int
    layout: str

    @property
    def matrix(self) -> Matrix:
        return Matrix(self.dtype, self.n, self.k, self.block_n, self.block_k)

    @property
    def number(self) -> NumberType:
        return number_type(self.dtype)


def jax_dtype(dtype: Any) -> Any:
    """Return jnp's dtype of the same name as torch's."""
    return jnp.dtype(str(dtype).removeprefix("torch."))


def as_bytes(array: Array) -> Array:
    return array if array.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(array, jnp.uint8)


def unpack_bits(data: Array, bits: int, k: int) -> Array:
    """Unpack uint8 [..., ceil(k*bits/8)] to codes [..., k]: code i is bits [i*b, i*b + b) of its row, lowest first."""
    if bits == 8:
        return data
    if bits in (1, 2, 4):
        shifts = jnp.arange(0, 8, bits, dtype=jnp.uint8)
        codes = (data[..., None] >> shifts) & ((1 << bits) - 1)
        return codes.reshape(*data.shape[:-1], data.shape[-1] * (8 // bits))[..., :k]
    first = np.arange(k) * bits
    wide = jnp.pad(data, [(0, 0)] * (data.ndim - 1) + [(0, 1)]).astype(jnp.uint16)
    pair = wide[..., first // 8] | wide[..., first // 8 + 1] << 8
    return ((pair >> (first % 8).astype(np.uint16)) & ((1 << bits) - 1)).astype(jnp.uint8)


def pack_bits(codes: Array, bits: int) -> Array:
    """Pack codes densely, eight bits to a byte: the inverse of :func:`unpack_bits`."""
    if bits == 8:
        return codes
    stream = (codes[..., None] >> jnp.arange(bits, dtype=jnp.uint8)) & 1
    stream = stream.reshape(*codes.shape[:-1], codes.shape[-1] * bits)
    short = -stream.shape[-1] % 8
    stream = jnp.pad(stream, [(0, 0)] * (stream.ndim - 1) + [(0, short)])
    return jnp.packbits(stream.astype(bool), axis=-1, bitorder="little")


def decode_float(codes: Array, number: NumberType) -> Array:
    """Decode uint8 codes of a float type to float32. Those that torch has, XLA has too; e8m0 is the exponent field of a
    float32; others use a table."""
    if not number.signed:
        bits = codes.astype(jnp.int32) << 23
        bits = jnp.where(codes == 0, 0x400000, bits)
        bits = jnp.where(codes == number.nan_code, 0x7FC00000, bits)
        return jax.lax.bitcast_convert_type(bits, jnp.float32)
    if number.storage != torch.uint8:
        return jax.lax.bitcast_convert_type(codes, jax_dtype(number.storage)).astype(jnp.float32)
    positive = [number.float_value(code) for code in range(number.max_code + 1)]
    positive += [math.inf] if number.specials == "ieee" else []
    positive += [math.nan] * ((1 << (number.bits - 1)) - len(positive))
    return _look_up(codes, [*positive, *(-value for value in positive)])


def _look_up(codes: Array, table: list[float] | tuple[float, ...]) -> Array:
    return jnp.asarray(table, jnp.float32)[codes.astype(jnp.int32)]


def decode(codes: Array, number: NumberType) -> Array:
    """Decode uint8 codes to float32; integers are converted unsigned, from 0."""
    if number.kind == "float":
        return decode_float(codes, number)
    return _look_up(codes, number.table) if number.kind == "codebook" else codes.astype(jnp.float32)


def scale_values(scale: Array, scale2: Array | None) -> Array:
    """Return block scales of any dtype as float32, times the global one."""
    if scale.dtype == jnp.uint8:
        scale = decode_float(scale, number_type("float8_e8m0" if scale2 is None else "float8_e4m3"))
    elif scale.dtype == jnp.float8_e8m0fnu:
        scale = decode_float(as_bytes(scale), number_type("float8_e8m0"))
    scale = scale.astype(jnp.float32)
    return scale if scale2 is None else scale * scale2


def spread(part: Array, matrix: Matrix) -> Array:
    """Repeat block entries [..., N/bn, K/bk] so that they broadcast against [..., N, K]."""
    for axis, size, block in ((-2, matrix.n, matrix.block_n), (-1, matrix.k, matrix.block_k)):
        if part.shape[axis] != 1 and block != 1:
            part = jax.lax.slice_in_dim(jnp.repeat(part, block, axis), 0, size, axis=axis)
    return part


def codes_of(weight: JaxWeight) -> Array:
    """Return the uint8 codes [..., N, K] of a plain weight."""
    return unpack_bits(as_bytes(weight.data), weight.number.bits, weight.k)


def signed_k_major(weight: JaxWeight) -> Array:
    """Return the signed codes [..., K, N] of a k_major weight: int8, or int4 if its data is int4 or the bytes of it."""
    return native(weight.data) if weight.dtype == "int4" and weight.data.dtype == jnp.uint8 else weight.data


def native(data: Array) -> Array:
    """Convert k_major int4 bytes [K, N/2] to XLA's int4 [K, N]: two to a byte on a TPU; on a CPU one, and slower to
    read."""
    pairs = jax.lax.bitcast_convert_type(data, jnp.int4)
    return pairs.reshape(*data.shape[:-1], 2 * data.shape[-1])


def dense_k_major(weight: JaxWeight) -> Array:
    """Dequantize a k_major weight, whose scale and zero are transposed too, to float32 [..., K, N]."""
    sideways = weight.matrix._replace(n=weight.k, k=weight.n, block_n=weight.block_k, block_k=weight.block_n)
    value = signed_k_major(weight).astype(jnp.float32)
    if weight.zero is not None:
        value = value - spread(weight.zero.astype(jnp.float32) - weight.number.midpoint, sideways)
    return value * spread(scale_values(weight.scale, weight.scale2), sideways)


def unread(*layouts: str) -> str | None:
    """Return why not all of the layouts can be read, or None."""
    others = [layout for layout in layouts if layout not in ("plain", NAME)]
    return f"XLA reads the layouts plain and {NAME}, not {' and '.join(others)}" if others else None


def dense(*args: Any) -> Array:
    """Dequantize a weight to float32 [..., N, K]: (decode(code) - zero) * scale * scale2."""
    weight = JaxWeight(*args)
    if weight.layout == NAME:
        return jnp.swapaxes(dense_k_major(weight), -1, -2)
    if reason := unread(weight.layout):
        raise ArgumentError(f"{reason}; repack the weight")
    value = decode(codes_of(weight), weight.number)
    if weight.number.kind == "int":
        zero = weight.number.midpoint if weight.zero is None else spread(weight.zero, weight.matrix)
        value = value - jnp.asarray(zero, jnp.float32)
    return value * spread(scale_values(weight.scale, weight.scale2), weight.matrix)
