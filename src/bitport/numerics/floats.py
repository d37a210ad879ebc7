"""Bit-exact conversion between small float types and float32, in integer arithmetic on the float32 bit pattern.

float32 is [sign 1 | exponent 8 | mantissa 23], value 2^(e - 127) * 1.m. A small type keeps M of the 23 mantissa bits:
shift the 24-bit significand right by 23 - M, plus as many places as the exponent is below the type's smallest, and
round. Adding the rounded significand (its implicit bit included) to (exponent - 1) << M gives the code: a carry out of
the mantissa propagates into the exponent field, and subnormal codes have exponent 0.

Inputs are float32, bfloat16 or float16 (the last two are exact in float32). float64 is refused because casting it to
float32 first would round twice; callers who accept that pass x.float().
"""

import itertools

import torch
from torch import Tensor

from bitport.numerics.dtypes import FLOATS
from bitport.numerics.rounding import RandomSource, Rounding, check_rounding, shift_round
from bitport.numerics.types import NumberType, number_type


def as_float32(x: Tensor) -> Tensor:
    if x.dtype not in FLOATS:
        raise TypeError(
            f"expected a tensor of float32, bfloat16 or float16, got {x.dtype}; "
            "cast it with .float() first (for float64 that is one more rounding)"
        )
    return x.to(torch.float32)


def _float_number(number: NumberType | str) -> NumberType:
    number = number_type(number)
    if number.kind != "float":
        raise ValueError(f"{number.name} is not a float type")
    return number


def encode(
    x: Tensor,
    number: NumberType | str,
    rounding: Rounding = "half_even",
    saturate: bool = True,
    generator: RandomSource = None,
) -> Tensor:
    """Round x to `number`; returns uint8 codes.

    Overflow (a magnitude that rounds above the largest finite value, or infinity) saturates to the largest finite
    value. Without `saturate` it becomes infinity, or NaN in a type without infinity; a type with neither saturates.
    NaN becomes NaN; in a type without NaN (fp6, fp4) it becomes code 0, and the caller marks the block in its scale.
    e8m0 has no sign and no zero: negative values become NaN, zero becomes 2^-127 with `saturate` and NaN without,
    values below 2^-127 become 2^-127. It has no mantissa, so neither neighbour is even and half_even rounds ties up.
    """
    number = _float_number(number)
    check_rounding(rounding)
    x = as_float32(x)
    if not number.signed:
        return _encode_e8m0(x, number, rounding, saturate, generator)
    if rounding == "half_even" and number.specials == "none":
        return _encode_by_thresholds(x, number)
    if rounding == "half_even" and saturate and number.storage != torch.uint8:
        return x.clamp(-number.max, number.max).to(number.storage).view(torch.uint8)
    bits = x.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    exponent = (magnitude >> 23).clamp(min=1)
    significand = magnitude - ((exponent - 1) << 23)
    target = exponent - (127 - number.bias)
    shift = (23 - number.mantissa_bits) + (1 - target).clamp(min=0)
    rounded = shift_round(significand, shift, bits < 0, rounding, generator)
    code = ((target.clamp(min=1) - 1) << number.mantissa_bits) + rounded
    overflow = number.max_code if saturate or number.specials == "none" else number.max_code + 1
    code = code.clamp(max=overflow)
    sign = torch.where(bits < 0, 1 << (number.bits - 1), 0)
    nan = number.nan_code | (0 if number.specials == "none" else sign)
    return torch.where(magnitude > 0x7F800000, nan, code | sign).to(torch.uint8)


def _encode_by_thresholds(x: Tensor, number: NumberType) -> Tensor:
    """Encode by counting the midpoints of neighbouring values below |x|: fewer and cheaper ops for the short tables of
    fp4 and fp6. An equal midpoint counts where the upper neighbour has the even code."""
    magnitude = x.abs()
    codes = torch.zeros_like(x, dtype=torch.uint8)
    values = [number.float_value(code) for code in range(number.max_code + 1)]
    for code, (low, high) in enumerate(itertools.pairwise(values)):
        middle = (low + high) / 2
        codes = codes + (magnitude >= middle if code % 2 else magnitude > middle)
    codes = codes | (x.signbit().to(torch.uint8) << (number.bits - 1))
    return torch.where(x.isnan(), number.nan_code, codes)


def e8m0_position(magnitude: Tensor) -> Tensor:
    """Position of a float32 >= 0 on the scale of e8m0 codes, int32 in units of 2^-23 code: the bits from 23 up are the
    code of the largest power of two not above it. For normal float32 this is the bit pattern itself. Below 2^-126 the
    pattern of 2^-127 is half a code; doubling the distance from it continues the scale down to code 0."""
    bits = magnitude.view(torch.int32)
    return torch.where(bits < 0x800000, (bits - 0x400000).clamp(min=0) * 2, bits)


def _encode_e8m0(x: Tensor, number: NumberType, rounding: Rounding, saturate: bool, generator: RandomSource) -> Tensor:
    position = e8m0_position(x.abs())
    fraction, shift = position & 0x7FFFFF, torch.full_like(position, 23)
    if rounding == "half_even":
        rounding = "half_away"
    code = (position >> 23) + shift_round(fraction, shift, torch.zeros_like(x, dtype=torch.bool), rounding, generator)
    code = code.clamp(max=number.max_code if saturate else number.nan_code)
    code = torch.where(x == 0, 0 if saturate else number.nan_code, code)
    return torch.where(x.isnan() | (x < 0), number.nan_code, code).to(torch.uint8)


def decode(codes: Tensor, number: NumberType | str) -> Tensor:
    """float32 values of uint8 codes; exact, since float32 represents every value of these types.

    Types that torch does not have are computed as significand * 2^exponent with the power of two built from its bits,
    so no intermediate float32 is subnormal and devices that flush subnormals give the same result. (e8m0's 2^-127 is
    itself subnormal.)"""
    number = _float_number(number)
    if not number.signed:
        code = codes.to(torch.int32)
        bits = torch.where(code == 0, 0x400000, code << 23)
        return torch.where(code == number.nan_code, 0x7FC00000, bits).view(torch.float32)
    if number.storage != torch.uint8:
        return codes.view(number.storage).to(torch.float32)
    sign_bit = 1 << (number.bits - 1)
    magnitude = codes & (sign_bit - 1)
    exponent = (magnitude >> number.mantissa_bits).clamp(min=1)
    significand = magnitude - ((exponent - 1) << number.mantissa_bits)
    power = (exponent.to(torch.int32) + (127 - number.bias - number.mantissa_bits)) << 23
    sign = (codes & sign_bit).to(torch.int32) << (32 - number.bits)
    value = significand.to(torch.float32) * (power | sign).view(torch.float32)
    if number.specials == "none":
        return value
    nan = (magnitude > number.max_code + (number.specials == "ieee")).to(torch.int32)
    special = (sign | 0x7F800000 | nan << 22).view(torch.float32)
    return torch.where(magnitude > number.max_code, special, value)


def nearest_value(x: Tensor, number: NumberType, out: Tensor) -> Tensor:
    """Write decode(encode(x)) to ``out``, for float32 and a signed type, in a tenth of the time. Values with exponent e
    are multiples of 2^(e - M), subnormal ones of the same step as those with the smallest exponent. NaN stays NaN."""
    held = torch.clamp(x, -number.max, number.max, out=out)
    power = (held.view(torch.int32) & 0x7F800000).view(torch.float32)
    step = power.clamp_(min=2.0 ** (1 - number.bias)).mul_(2.0**-number.mantissa_bits)
    return held.div_(step).round_().mul_(step)
