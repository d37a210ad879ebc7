"""The reference ("judge"): the float64 value of a quantized matrix, directly from the definition of its number type.

It shares no arithmetic with the kernels: each code is extracted from the bit stream by itself, its value looked up in a
table computed with Python floats, and scales are gathered by index.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitport.numerics import NumberType, Quantized, number_type


def value_of(parts: Quantized, dtype: str, n: int, k: int, block_n: int, block_k: int) -> Tensor:
    """Dequantize canonical parts to float64 [..., n, k] on the CPU."""
    number = number_type(dtype)
    row, column = torch.arange(n) // block_n, torch.arange(k) // block_k
    codes = _codes(parts.data.cpu(), number, k)
    value = torch.tensor([code_value(number, code) for code in range(256)], dtype=torch.float64)[codes]
    scale = _float64(parts.scale)[..., row[:, None], column]
    if parts.zero is not None:
        value = codes.double() - _float64(parts.zero)[..., row[:, None], column]
    if parts.scale2 is not None:
        scale = scale * parts.scale2.cpu().double()
    return value * scale


def code_value(number: NumberType, code: int) -> float:
    """The value of one code before scaling."""
    if code > number.qmax:
        return float("nan")
    if number.kind == "int":
        return code - number.midpoint
    if number.kind == "codebook":
        return number.table[code]
    fraction = code & ((1 << number.mantissa_bits) - 1)
    exponent = code >> number.mantissa_bits & ((1 << number.exponent_bits) - 1)
    sign = -1.0 if number.signed and code >> (number.bits - 1) else 1.0
    last = exponent == (1 << number.exponent_bits) - 1
    if number.specials == "ieee" and last:
        return float("nan") if fraction else sign * float("inf")
    if number.specials == "nan" and last and fraction == (1 << number.mantissa_bits) - 1:
        return float("nan")
    if number.mantissa_bits == 0:
        return 2.0 ** (exponent - number.bias)
    mantissa = fraction / (1 << number.mantissa_bits) + (1 if exponent else 0)
    return float(sign * mantissa * 2.0 ** (max(exponent, 1) - number.bias))


def _codes(data: Tensor, number: NumberType, k: int) -> Tensor:
    """Extract codes: code i of a row is bits [i*b, i*b + b) of its bytes, the first byte lowest."""
    stored = data.view(torch.uint8).long()
    stream = torch.cat([stored, stored.new_zeros(*stored.shape[:-1], 1)], -1)
    first = torch.arange(k) * number.bits
    pair = stream[..., first // 8] | stream[..., first // 8 + 1] << 8
    return pair >> first % 8 & number.qmax


def _float64(part: Tensor) -> Tensor:
    part = part.cpu()
    if part.element_size() > 1 or part.dtype == torch.uint8:
        return part.double()
    number = number_type({torch.float8_e8m0fnu: "float8_e8m0", torch.float8_e4m3fn: "float8_e4m3"}[part.dtype])
    table = torch.tensor([code_value(number, code) for code in range(256)], dtype=torch.float64)
    return table[part.view(torch.uint8).long()]
