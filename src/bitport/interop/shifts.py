"""Zero points of integers, and the conversion from value = code * scale + shift to value = (code - zero) * scale.

zero is -shift / scale. If it is an integer in the whole matrix, nothing is rounded: the scale is kept, and the zero
point is an integer, or absent if it is always the midpoint. Otherwise both are float32, and zero is rounded to it once:
it is off by at most 2^-24 of itself, and hence the value by at most 2^-24 of the shift.

A block of equal numbers has the scale 0, or one so small that zero would not be finite. It becomes code 0 with the
scale and zero of :func:`of_constants`, which represent that number exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitport.numerics import Format, Quantized
from bitport.numerics.packing import pack_bits
from bitport.tensor import QTensor

ROUNDED = (
    "zero points are -shift / scale, which is rounded to float32 where it is no whole number: a value differs by at "
    "most 2^-24 of the shift of its group"
)

ROUNDED_BACK = "shifts are -zero * scale, rounded to float32 in some groups: values there differ by 2^-24 of it"


def of_shifts(codes: Tensor, scale: Tensor, shift: Tensor, bits: int, group: int) -> tuple[Quantized, Format]:
    """``codes``: uint8 [.., N, K]; ``scale``, ``shift``: [.., N, ceil(K / group)], the shift float64 if it needs to."""
    exact, zero = scale.double(), -shift.double() / scale.double()
    whole = zero.round()
    if bool(((whole * exact == -shift.double()) & (whole >= 0) & (whole < 1 << bits)).all()):
        return of_zero_points(pack_bits(codes.contiguous(), bits), scale, whole, bits, (1, group))
    zero = zero.float()
    constant = (exact == 0) | (zero.isinf() & exact.isfinite())
    size, sign = of_constants(shift.float())
    scale, zero = torch.where(constant, size, scale.float()), torch.where(constant, sign, zero)
    codes = codes.masked_fill(constant.repeat_interleave(group, -1)[..., : codes.shape[-1]], 0)
    fmt = Format(dtype=f"int{bits}", block=(1, group), zero="float", scale="input")
    return Quantized(pack_bits(codes, bits), scale, zero), fmt


def of_constants(number: Tensor) -> tuple[Tensor, Tensor]:
    """(scale, zero) for which code 0 is exactly ``number``: its magnitude and -1 or 1; for 0, twice 0.

    (1, -number) is as exact, but kernels subtract the midpoint h of the codes from the zero point in float32: 2^-24 h
    would be lost, and that times |x| in each product, however small the number is. Here it is |number| times that. Only
    infinite numbers have that form, since readers of files multiply the scale by code 0."""
    size = torch.where(number.isinf(), 1.0, number.abs())
    return size, -torch.where(number == 0, number, number / size)


def of_zero_points(
    stream: Tensor, scale: Tensor, zero: Tensor, bits: int, block: tuple[int, int], droppable: bool = True
) -> tuple[Quantized, Format]:
    """Integers in a bit stream, with whole zero points, which ``droppable`` allows to leave out if all are the
    midpoint."""
    midpoint = droppable and bits > 1 and bool((zero == 1 << (bits - 1)).all())
    fmt = Format(dtype=f"int{bits}", block=block, zero="none" if midpoint else "int", scale="input")
    return Quantized(stream, scale.contiguous(), None if midpoint else zero.to(torch.uint8).contiguous()), fmt


def zero_points(q: QTensor) -> Tensor:
    """The zero points of integers; the midpoint where they have none."""
    return torch.full_like(q.scale, q.scheme.weight.number.midpoint) if q.zero is None else q.zero


def to_shifts(q: QTensor) -> tuple[Tensor, Tensor, bool]:
    """The inverse: (scale, shift, whether no shift was rounded), in the dtype of ``q`` if that represents both, else in
    float32. A shift counts as exact if it yields the zero point it was computed from."""
    zero = zero_points(q).double()
    exact = -zero * q.scale.double()
    for dtype in (q.dtype, torch.float32):
        scale, shift = q.scale.to(dtype), exact.to(dtype)
        same = (shift == exact) | ((-shift.double() / scale.double()).float() == zero.float())
        whole = bool((same & (scale == q.scale)).all())
        if whole:
            break
    return scale, shift, whole
