"""The scale (and zero point) of each block, chosen from its range.

    symmetric                scale = amax / max(type)
    with a zero point        range [min(x, 0), max(x, 0)] in 2^b - 1 steps, zero = -low / scale (rounded if "int")
    global scale (nvfp4)     scale2 = amax of the matrix / (448 * max), scale = e4m3(amax / max / scale2)
    e8m0 (OCP MX)            a power of two by `scale_rule`, with emax = floor(log2 max(type)):
        floor                2^(floor(log2 amax) - emax)
        even                 the same, after rounding amax to the element type's mantissa
        ceil                 2^(ceil(log2 amax) - emax)
        rceil                2^ceil(log2(amax / max)), the smallest that clips nothing

Edge cases are all defined:

    all zero                 scale 1 (e8m0: its smallest, 2^-127; types without a code for zero, like int1: 0), and zero
                             point 2^(b-1): kernels center codes there, so they multiply by zeros only; any other zero
                             point would leave the difference of two sums that are rounded separately
    a NaN or infinity in it  scale NaN: the block reads as NaN, the other blocks are untouched
    scale underflows         the scale dtype's smallest positive value
    scale overflows          the scale dtype's largest value: the block clips
    x near its dtype's max   the scale is lowered by one unit in the last place (e8m0: halved) where the largest code
                             times the scale would overflow (e8m0: in float32; a block whose amax is just below
                             float16's 65504 may become infinite in float16)
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bitport.numerics.blocks import block_amax, to_blocks
from bitport.numerics.floats import as_float32, decode, e8m0_position, encode
from bitport.numerics.format import Format
from bitport.numerics.rounding import round_to_int
from bitport.numerics.types import NumberType, number_type

E4M3 = number_type("float8_e4m3")
E8M0 = number_type("float8_e8m0")
_FLOAT32_MAX = torch.finfo(torch.float32).max
# The product of the smallest global scale and the smallest e4m3 scale, 2^-9, is the smallest float32.
_SMALLEST_GLOBAL = 2.0**-140


class Params(NamedTuple):
    """Scale and zero point of each block, and the global scale, in the dtypes they are stored in."""

    scale: Tensor
    zero: Tensor | None
    scale2: Tensor | None


def choose_qparams(x: Tensor, fmt: Format, scale2: Tensor | None = None) -> Params:
    """(scale, zero, scale2) for x [..., N, K] in their storage dtypes; a given scale2 is used unchanged."""
    if scale2 is not None and not fmt.global_scale:
        raise ValueError(f"{fmt} has no scale2")
    if fmt.zero != "none":
        return Params(*_affine(x, fmt), None)
    amax = as_float32(block_amax(x, fmt.block))
    if fmt.global_scale and scale2 is None:
        scale2 = _global_scale(amax, fmt)
    if fmt.scale == "e8m0":
        return Params(power_of_two_scale(amax, fmt), None, None)
    raw = _divide(amax, fmt.number.max)
    if fmt.scale == "e4m3":
        raw = raw if scale2 is None else raw / scale2
        scale = _defined(raw.clamp(E4M3.smallest, E4M3.max), amax, fmt)
        return Params(encode(scale, E4M3).view(torch.float8_e4m3fn), None, scale2)
    return Params(_stored(raw, amax, fmt.number.max, x.dtype, fmt), None, None)


def _divide(x: Tensor, divisor: float) -> Tensor:
    """x / divisor, correctly rounded: for a Python scalar some devices multiply by the rounded reciprocal instead."""
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


def _defined(scale: Tensor, amax: Tensor, fmt: Format) -> Tensor:
    scale = torch.where(amax == 0, 1.0 if fmt.number.has_zero or fmt.zero != "none" else 0.0, scale)
    return torch.where(amax.isfinite(), scale, torch.nan)


def _stored(raw: Tensor, amax: Tensor, largest: float, input_dtype: torch.dtype, fmt: Format) -> Tensor:
    dtype = fmt.scale_dtype(input_dtype)
    return _defined(raw.clamp(*scale_range(dtype, input_dtype, largest)), amax, fmt).to(dtype)


def scale_range(dtype: torch.dtype, input_dtype: torch.dtype, largest: float) -> tuple[float, float]:
    """(smallest, largest) scale in ``dtype``. The product of the largest with ``largest``, the magnitude of the largest
    code, is finite in ``input_dtype``."""
    limits = torch.finfo(dtype)
    highest = min(limits.max, torch.finfo(input_dtype).max / largest * (1 - limits.eps))
    return limits.smallest_normal * limits.eps, highest


def _affine(x: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """(scale, zero) of a format with a zero point. Zero padding of short blocks is harmless: the range includes 0.

    The range is first clamped to steps / (steps + 2) of the input dtype's, so that its ends stay finite although
    rounding the zero point moves them outward by up to half a step. Halving before the subtraction avoids overflow
    and is exact."""
    steps = fmt.number.qmax
    blocked = to_blocks(x, fmt.block)
    low = as_float32(blocked.amin((-3, -1))).clamp(max=0)
    high = as_float32(blocked.amax((-3, -1))).clamp(min=0)
    amax = torch.maximum(high, -low)
    end = torch.finfo(x.dtype).max * (steps / (steps + 2))
    low, high = low.clamp(min=-end), high.clamp(max=end)
    scale = _stored(_divide(high / 2 - low / 2, steps / 2), amax, 1.0, x.dtype, fmt)
    zero = (0 - low) / scale.to(torch.float32)  # not -low, which would give -0.0
    zero = torch.where(zero.isnan(), 0, zero.clamp(0, steps))
    zero = torch.where(amax == 0, (steps + 1) // 2, zero)
    if fmt.zero == "int":
        return scale, round_to_int(zero).to(torch.uint8)
    return scale, zero.to(scale.dtype)


def _global_scale(amax: Tensor, fmt: Format) -> Tensor:
    """float32 [..., 1, 1], from the finite blocks only: one bad block must not change the others."""
    largest = E4M3.max * fmt.number.max
    lowest, highest = global_scale_range(fmt.number)
    finite = torch.where(amax.isfinite(), amax, 0)
    amax = torch.cat([finite.flatten(-2), finite.new_zeros(*finite.shape[:-2], 1)], -1).amax(-1)[..., None, None]
    scale2 = _divide(amax, largest).clamp(lowest, highest)
    return torch.where(amax == 0, 1.0, scale2)


def global_scale_range(number: NumberType) -> tuple[float, float]:
    """(smallest, largest) global scale. At the largest, the product of both scales is finite, also when multiplied by
    the largest code."""
    return _SMALLEST_GLOBAL, _FLOAT32_MAX / (E4M3.max * max(number.max, 1.0)) * (1 - 2.0**-20)


def power_of_two_scale(amax: Tensor, fmt: Format) -> Tensor:
    """e8m0 scale by exponent arithmetic on the bits of amax (float32, >= 0); no logarithm, so powers of two are exact.
    The last step is a cast rather than a view of bytes because inductor has no buffers of that dtype on the CPU.

    With amax = 1.f * 2^e and max(type) = 1.g * 2^emax: ceil moves up if f > 0, rceil if f > g, even if 1.f rounds to 2.
    """
    number = fmt.number
    position = e8m0_position(amax)
    exponent, fraction = position >> 23, position & 0x7FFFFF
    if fmt.scale_rule == "even":
        exponent = exponent + ((fraction + (1 << (22 - number.mantissa_bits))) >> 23)
    elif fmt.scale_rule != "floor":
        largest = fraction_of_max(number) if fmt.scale_rule == "rceil" else 0
        exponent = exponent + (fraction > largest)
    code = (exponent - number.emax).clamp(0, 254 - number.emax).to(torch.uint8)
    code = torch.where(amax.isfinite(), code, E8M0.nan_code)
    return decode(code, E8M0).to(torch.float8_e8m0fnu)


def fraction_of_max(number: NumberType) -> int:
    """g of max(type) = 1.g * 2^emax, in units of 2^-23."""
    return int((number.max / 2.0**number.emax - 1) * 2**23)
