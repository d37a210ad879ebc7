"""Factorization of k-quant scales: the scales of a block are one float16, d, times small integers, s.

bitport stores the products d * s, which are exact in float32 (11 + 8 bits). Several pairs may have the same products:
(2 d, s) and (d, 2 s) do. The d of the least magnitude is chosen. llama.cpp does so, too, since it maps the largest s to
the end of its range.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitport.errors import ArgumentError


def factors(products: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    """Split ``products`` [.., G] into d, float16 [..], and s, int16 [.., G] from ``low`` to ``high``; ArgumentError if
    no d yields them exactly."""
    rows = products.flatten(0, -2).double()
    largest = rows.gather(-1, rows.abs().argmax(-1, keepdim=True)).squeeze(-1)
    d = torch.zeros(len(rows), dtype=torch.float16)
    s = torch.zeros(rows.shape, dtype=torch.int16)
    left = largest.nonzero().squeeze(-1)
    for end in sorted(range(low, high + 1), key=abs, reverse=True):
        if not len(left) or not end:
            break
        one = (largest[left] / end).half()
        whole = (rows[left] / one.double().unsqueeze(-1)).round()
        same = whole * one.double().unsqueeze(-1) == rows[left]
        fits = (same & (whole >= low) & (whole <= high)).all(-1)
        d[left[fits]], s[left[fits]] = one[fits], whole[fits].to(torch.int16)
        left = left[~fits]
    if len(left):
        raise ArgumentError(
            f"the numbers {', '.join(f'{number:g}' for number in rows[left[0]].tolist())} of a block are no float16 "
            f"times whole numbers from {low} to {high}"
        )
    return d.reshape(products.shape[:-1]), s.reshape(products.shape)


def minimum(scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """The m, float64 with ``bits`` significant bits, for which zero = m / scale when rounded to float32. It is unique:
    the rounding changes scale * zero by a relative 2^-24, but such m are 2^-bits apart."""
    fraction, exponent = torch.frexp(scale.double() * zero.double())
    found = torch.ldexp((fraction * 2.0**bits).round() * 2.0**-bits, exponent)
    same = found.float() / scale == zero
    if not bool(same.all()):
        at = int((~same).flatten().nonzero()[0])
        raise ArgumentError(
            f"the zero point {zero.flatten()[at].item():g} times its scale {scale.flatten()[at].item():g} is no number "
            f"of {bits} bits"
        )
    return found
