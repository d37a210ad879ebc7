"""Integers of formats that say value = code * scale + shift, in bitport's form value = (code - zero) * scale.

zero is -shift / scale. Where it is a whole number in all of a matrix nothing is rounded: the scale stays as it is
stored, and the zero point is an integer, or none at all where it is the midpoint. Else both are float32, zero rounded
to it once: off by at most 2^-24 of itself, and so the value by at most 2^-24 of the shift.

A block of one number has the scale 0, or one so small that zero would not be finite. It becomes the code 0, the scale
1 and the zero -shift, which is that number exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitport.numerics import Format, Quantized
from bitport.numerics.packing import pack_bits

ROUNDED = (
    "zero points are -shift / scale, which is rounded to float32 where it is no whole number: a value differs by at "
    "most 2^-24 of the shift of its group"
)


def of_shifts(codes: Tensor, scale: Tensor, shift: Tensor, bits: int, group: int) -> tuple[Quantized, Format]:
    """``codes``: uint8 [N, K]; ``scale``: [N, ceil(K / group)]; ``shift``: the same, in float64 where it needs that."""
    exact, zero = scale.double(), -shift.double() / scale.double()
    whole = zero.round()
    if bool(((whole * exact == -shift.double()) & (whole >= 0) & (whole < 1 << bits)).all()):
        middle = bits > 1 and bool((whole == 1 << (bits - 1)).all())
        fmt = Format(dtype=f"int{bits}", block=(1, group), zero="none" if middle else "int", scale="input")
        zeros = None if middle else whole.to(torch.uint8)
        return Quantized(pack_bits(codes.contiguous(), bits), scale.contiguous(), zeros), fmt
    zero = zero.float()
    constant = (exact == 0) | (zero.isinf() & exact.isfinite())
    zero = torch.where(constant, -shift.float(), zero)
    scale = torch.where(constant, 1.0, scale.float())
    codes = codes.masked_fill(constant.repeat_interleave(group, -1)[:, : codes.shape[-1]], 0)
    fmt = Format(dtype=f"int{bits}", block=(1, group), zero="float", scale="input")
    return Quantized(pack_bits(codes, bits), scale, zero), fmt
