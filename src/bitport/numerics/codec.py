"""Quantize a matrix to codes and scales, and back. All arithmetic is float32, division included. The scale is first
rounded to its storage dtype and codes are computed with the rounded scale, so quantize and dequantize agree on it.

    quantize     code = clamp(round(x / scale) + zero)          floats, codebooks: code = encode(x / scale)
    dequantize   x    = (code - zero) * scale                   floats, codebooks: x    = decode(code) * scale

With a global scale, `scale` here means the float32 product of both.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bitport.numerics.blocks import from_blocks, spread, to_blocks
from bitport.numerics.codebooks import decode_codebook, encode_codebook
from bitport.numerics.floats import as_float32, decode, encode
from bitport.numerics.format import Format
from bitport.numerics.packing import from_storage, to_storage
from bitport.numerics.qparams import Params, choose_qparams
from bitport.numerics.rounding import RandomSource, Rounding, random_bits, round_to_int
from bitport.numerics.types import NumberType


class Quantized(NamedTuple):
    """The parts of a quantized matrix: data [..., N, bytes] in the storage dtype of the number type, scale and zero
    [..., SN, SK], scale2 float32 [..., 1, 1]."""

    data: Tensor
    scale: Tensor
    zero: Tensor | None = None
    scale2: Tensor | None = None


def quantize(
    x: Tensor,
    fmt: Format,
    *,
    rounding: Rounding = "half_even",
    generator: RandomSource = None,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    scale2: Tensor | None = None,
) -> Quantized:
    """Quantize x [..., N, K] to `fmt`. A given scale (with its zero and scale2) is used unchanged; a given scale2 alone
    fixes the global scale. Codes are constants: no gradient flows.

    With a given scale, a NaN in x stays NaN only in number types that have NaN; in others it becomes zero."""
    x = x.detach()
    if scale is None:
        if zero is not None:
            raise ValueError("a zero point is in units of a scale: give scale= with zero=")
        scale, zero, scale2 = choose_qparams(x, fmt, scale2)
    _check_parts(scale, zero, scale2, fmt, x)
    codes = quantize_codes(x, fmt, scale, zero, scale2, rounding, generator)
    return Quantized(to_storage(codes, fmt.number), scale, zero, scale2)


def dequantize(q: Quantized, fmt: Format, n: int, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix [..., n, k], computed in float32 and cast to `dtype` at the end."""
    codes = from_storage(q.data, fmt.number, k)
    if codes.shape[-2] != n:
        raise ValueError(f"the data has {codes.shape[-2]} rows, asked for n={n}")
    return dequantize_codes(codes, fmt, q.scale, q.zero, q.scale2).to(dtype)


def quantize_dequantize(x: Tensor, fmt: Format, *, scale: Tensor | None = None, scale2: Tensor | None = None) -> Tensor:
    """Quantize and dequantize x without packing; returns float32. Scales may be given as for :func:`quantize`, without
    a zero point."""
    x = x.detach()
    params = choose_qparams(x, fmt, scale2) if scale is None else Params(scale, None, scale2)
    return dequantize_codes(quantize_codes(x, fmt, *params), fmt, *params)


def quantize_codes(
    x: Tensor,
    fmt: Format,
    scale: Tensor,
    zero: Tensor | None = None,
    scale2: Tensor | None = None,
    rounding: Rounding = "half_even",
    generator: RandomSource = None,
) -> Tensor:
    """Unpacked uint8 codes [..., N, K]. For float types, a block with a NaN scale is filled with nan_code: IEEE 754
    leaves the sign of x / NaN open, and processors differ."""
    number = fmt.number
    if rounding == "stochastic":
        generator = to_blocks(random_bits(x, generator), fmt.block)
    factor = spread(block_scale(scale, scale2))
    steps = to_blocks(as_float32(x), fmt.block) / factor
    if number.kind == "float":
        codes = encode(steps, number, rounding, generator=generator)
        if number.specials != "none":  # otherwise encode() already gives the unsigned code of zero for NaN
            codes = torch.where(factor.isnan(), number.nan_code, codes)
    elif number.kind == "codebook":
        if rounding != "half_even":
            raise ValueError(f"{number.name} rounds to the nearest entry only, not {rounding}")
        codes = encode_codebook(steps, number.table)
    else:
        codes = _integer_codes(steps, fmt, zero, rounding, generator)
    return from_blocks(codes, *x.shape[-2:])


def _integer_codes(
    steps: Tensor, fmt: Format, zero: Tensor | None, rounding: Rounding, generator: RandomSource
) -> Tensor:
    offset = zero_of(fmt, zero)
    if has_whole_zero(fmt):
        rounded = round_to_int(steps, rounding, generator) + offset
    else:
        rounded = round_to_int(steps + offset, rounding, generator)
    return torch.where(rounded.isnan(), offset, rounded).clamp(0, fmt.number.qmax).to(torch.uint8)


def dequantize_codes(
    codes: Tensor, fmt: Format, scale: Tensor, zero: Tensor | None = None, scale2: Tensor | None = None
) -> Tensor:
    """Dequantize uint8 codes [..., N, K] to float32 [..., N, K]."""
    values = values_of(to_blocks(codes, fmt.block), fmt.number)
    if fmt.number.kind == "int":
        values = values - zero_of(fmt, zero)
    return from_blocks(values * spread(block_scale(scale, scale2)), *codes.shape[-2:])


def nearest_codes(steps: Tensor, number: NumberType) -> Tensor:
    """The codes of a float type or codebook whose values are nearest to ``steps``."""
    return encode(steps, number) if number.kind == "float" else encode_codebook(steps, number.table)


def values_of(codes: Tensor, number: NumberType) -> Tensor:
    """float32 values of codes, before a zero point and a scale: of an integer type, the codes themselves."""
    if number.kind == "float":
        return decode(codes, number)
    if number.kind == "codebook":
        return decode_codebook(codes, number.table)
    return codes.to(torch.float32)


def zero_of(fmt: Format, zero: Tensor | None) -> Tensor | float:
    """The zero point of an integer format in units of codes, to be broadcast over blocks."""
    return fmt.number.midpoint if zero is None else spread(zero.to(torch.float32))


def has_whole_zero(fmt: Format) -> bool:
    """Whether the zero point is a whole number of codes. It is added after rounding, which keeps the addition exact; a
    fractional one is added before."""
    return fmt.number.kind == "int" and fmt.zero != "float" and fmt.number.midpoint != 0.5


def block_scale(scale: Tensor, scale2: Tensor | None = None) -> Tensor:
    """The float32 factor of each block, whatever the storage dtype of its scale."""
    scale = scale.to(torch.float32)
    return scale if scale2 is None else scale * scale2


def readable(parts: Quantized) -> Quantized:
    """Convert e8m0 scales to float32. To be called before unpacking a layout: inductor (torch 2.13, CPU) generates no
    loops that read or write e8m0, not even as bytes."""
    return parts._replace(scale=block_scale(parts.scale)) if parts.scale.dtype == torch.float8_e8m0fnu else parts


def _check_parts(scale: Tensor, zero: Tensor | None, scale2: Tensor | None, fmt: Format, x: Tensor) -> None:
    expected: dict[str, tuple[Tensor | None, torch.dtype | None, tuple[int, ...]]] = {
        "scale": (scale, fmt.scale_dtype(x.dtype), fmt.scale_shape(*x.shape[-2:])),
        "zero": (zero, fmt.zero_dtype(x.dtype), fmt.scale_shape(*x.shape[-2:])),
        "scale2": (scale2, torch.float32 if fmt.global_scale else None, (1, 1)),
    }
    for name, (part, dtype, shape) in expected.items():
        if part is None and dtype is not None:
            raise ValueError(f"{fmt} needs {name}= with the given scale")
        if part is not None and dtype is None:
            raise ValueError(f"{fmt} has no {name}")
        if part is not None and (part.dtype != dtype or part.shape[-2:] != shape):
            raise ValueError(
                f"{name} must be {dtype} with last axes {shape}, got {part.dtype} of shape {tuple(part.shape)}"
            )
