"""Encode numbers inside kernels: the scale of a block, rounding to a type, and the code of a rounded number.

Every step is that of numerics.qparams and numerics.codec in the same float32 arithmetic, so codes are bitwise the same,
edge cases included.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bitport.backends.triton.decode import above_finite, bias_of, bits_of, mantissa_of, sign_of
from bitport.numerics import NUMBER_TYPES

MAGIC = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding it to a float32 below 2^22 rounds that to an integer, halves to even."""
INFINITE = tl.constexpr(0x7F800000)
"""The bits of infinity; those of a NaN are larger."""


@triton.constexpr_function
def max_of(number: str) -> float:
    return NUMBER_TYPES[number].max


@triton.constexpr_function
def qmax_of(number: str) -> float:
    return float(NUMBER_TYPES[number].qmax)


@triton.constexpr_function
def emax_of(number: str) -> int:
    return NUMBER_TYPES[number].emax


@triton.constexpr_function
def nan_of(number: str) -> int:
    return NUMBER_TYPES[number].nan_code


@triton.constexpr_function
def rceil_limit(number: str) -> int:
    """Return the largest mantissa of amax, in units of 2^-23, that does not need the next power of two."""
    return int((NUMBER_TYPES[number].max / 2.0 ** NUMBER_TYPES[number].emax - 1) * 2**23)


@triton.jit
def divided(value: tl.tensor, divisor: tl.tensor) -> tl.tensor:
    """Divide with correct rounding; ``divisor`` is a tensor or number that broadcasts to ``value``."""
    return tl.div_rn(value, tl.zeros_like(value) + divisor)


@triton.jit
def whole(value: tl.tensor) -> tl.tensor:
    """Round to the nearest integer, halves to even; |value| is at most 2^22."""
    return (value + MAGIC) - MAGIC


@triton.jit
def to_float(value: tl.tensor, NUMBER: tl.constexpr) -> tl.tensor:
    """Round float32 to the nearest value of a small float type, clamped to its range, NaN kept: adding 1.5 * 2^23 steps
    rounds."""
    limit: tl.constexpr = max_of(NUMBER)
    cut = tl.where(value == value, tl.minimum(tl.maximum(value, -limit), limit), value)
    exponent = (cut.to(tl.int32, bitcast=True) >> 23) & 0xFF
    step = tl.maximum(exponent, 128 - bias_of(NUMBER)) - mantissa_of(NUMBER)
    magic = (((step + 23) << 23) | 0x400000).to(tl.float32, bitcast=True)
    return (cut + magic) - magic


@triton.jit
def float_code(rounded: tl.tensor, signed: tl.tensor, NUMBER: tl.constexpr) -> tl.tensor:
    """Return the int32 code of ``rounded``, to_float's result for ``signed``, whose sign is used since a zero may have
    lost it. The smallest normal number is added to subnormals, so that their bits are those of a normal number, and
    subtracted from the code."""
    MANTISSA: tl.constexpr = mantissa_of(NUMBER)
    BIAS: tl.constexpr = bias_of(NUMBER)
    magnitude = tl.abs(rounded)
    small = magnitude < 2.0 ** (1 - BIAS)
    lifted = tl.where(small, magnitude + 2.0 ** (1 - BIAS), magnitude).to(tl.int32, bitcast=True)
    code = ((lifted - ((127 - BIAS) << 23)) >> (23 - MANTISSA)) - tl.where(small, 1 << MANTISSA, 0)
    sign = (signed.to(tl.int32, bitcast=True) >> (32 - bits_of(NUMBER))) & sign_of(NUMBER)
    if above_finite(NUMBER) > 0:
        code = tl.where(rounded == rounded, code, nan_of(NUMBER)) | sign
    else:
        code = tl.where(rounded == rounded, code | sign, nan_of(NUMBER))
    return code


@triton.jit
def tiny() -> tl.tensor:
    """Return 2^-149, made from its bits: a literal would be float64 in Triton 3.6."""
    return tl.full((), 1, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def defined(scale: tl.tensor, amax: tl.tensor, bad: tl.tensor) -> tl.tensor:
    """Replace the scale by 1 for a block of zeros, by NaN for one with a NaN or an infinity."""
    scale = tl.where(amax == 0, 1.0, scale)
    return tl.where((bad > 0) | (amax == float("inf")), float("nan"), scale)


@triton.jit
def linear_scale(
    amax: tl.tensor, bad: tl.tensor, lowest: tl.tensor, highest: tl.tensor, NUMBER: tl.constexpr
) -> tl.tensor:
    """Return the scale amax / max of the type, from ``lowest`` to ``highest``."""
    raw = divided(amax, max_of(NUMBER))
    return defined(tl.minimum(tl.maximum(raw, lowest), highest), amax, bad)


@triton.jit
def range_scale(
    low: tl.tensor, high: tl.tensor, bad: tl.tensor, lowest: tl.tensor, highest: tl.tensor, QMAX: tl.constexpr
) -> tl.tensor:
    """Return the scale of a block with a zero point, whose codes 0 to QMAX span ``low`` to ``high``."""
    raw = divided(high * 0.5 - low * 0.5, QMAX * 0.5)
    return defined(tl.minimum(tl.maximum(raw, lowest), highest), tl.maximum(high, -low), bad)


@triton.jit
def zero_point(low: tl.tensor, high: tl.tensor, bad: tl.tensor, scale: tl.tensor, QMAX: tl.constexpr) -> tl.tensor:
    """Return the zero point that goes with it, in units of codes and not yet rounded."""
    zero = divided(0.0 - low, scale)  # not -low, which would give -0.0
    zero = tl.where(zero == zero, tl.minimum(tl.maximum(zero, 0.0), QMAX), 0.0)
    return tl.where((low == high) & (bad == 0), (QMAX + 1.0) * 0.5, zero)


@triton.jit
def small_scale(amax: tl.tensor, bad: tl.tensor, second: tl.tensor, NUMBER: tl.constexpr) -> tl.tensor:
    """Return the e4m3 scale of a block, in units of the global one."""
    raw = divided(divided(amax, max_of(NUMBER)), second)
    return to_float(defined(tl.minimum(tl.maximum(raw, 2.0**-9), 448.0), amax, bad), "float8_e4m3")


@triton.jit
def power_of_two(amax: tl.tensor, bad: tl.tensor, NUMBER: tl.constexpr, RULE: tl.constexpr) -> tl.tensor:
    """Return the code of the e8m0 scale of a block."""
    bits = amax.to(tl.int32, bitcast=True)
    position = tl.where(bits < 0x800000, tl.maximum(bits - 0x400000, 0) * 2, bits)
    exponent, fraction = position >> 23, position & 0x7FFFFF
    if RULE == "even":
        exponent += (fraction + (1 << (22 - mantissa_of(NUMBER)))) >> 23
    else:
        exponent += (fraction > rceil_limit(NUMBER)).to(tl.int32)
    code = tl.minimum(tl.maximum(exponent - emax_of(NUMBER), 0), 254 - emax_of(NUMBER))
    return tl.where((bad > 0) | (amax == float("inf")), 255, code)


@triton.jit
def global_scale(amax: tl.tensor, lowest: tl.tensor, highest: tl.tensor, NUMBER: tl.constexpr) -> tl.tensor:
    """Return the global scale above e4m3 scales, from the largest magnitude of the finite blocks."""
    raw = divided(amax, 448.0 * max_of(NUMBER))
    return tl.where(amax == 0, 1.0, tl.minimum(tl.maximum(raw, lowest), highest))
