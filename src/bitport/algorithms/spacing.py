"""The numbers of a format near a given value, in units of the scale: nearest after a shift, or rounding to one."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from bitport.numerics import Format, NumberType, Params, block_scale, spread
from bitport.numerics.codec import has_whole_zero, values_of, zero_of

INSIDE = 0.49
"""Share of the gap to a neighbour: surely rounds to the number itself, and to the neighbour after a half-gap shift."""


def snapped(units: Tensor, shift: Tensor, fmt: Format, params: Params) -> tuple[Tensor, Tensor]:
    """Return the number nearest to ``units + shift``, with the shift in units of gaps between numbers, and a mask of
    elements that were not clamped. All in blocks (:func:`bitport.numerics.to_blocks`)."""
    number = fmt.number
    if number.kind == "int":
        zero, moved = zero_of(fmt, params.zero), units + shift
        raw = moved.round_() + zero if has_whole_zero(fmt) else (moved + zero).round_()
        codes = raw.clamp(0, number.qmax)
        return codes - zero, codes == raw
    values = _values(number, units.device)
    above = torch.bucketize(units, values).clamp(1, len(values) - 1)
    moved = units + shift * (values[above] - values[above - 1])
    return values[torch.bucketize(moved, _middles(values))], moved.abs() <= number.max


def within(x: Tensor, q: Tensor, fmt: Format, params: Params) -> Tensor:
    """Move x, in blocks, by the minimum needed to round to q, which are numbers of the format."""
    scale = spread(block_scale(params.scale, params.scale2))
    units, number = q / scale, fmt.number
    if number.kind == "int":
        code = units + zero_of(fmt, params.zero)
        low = torch.where(code < 0.5, -torch.inf, units - INSIDE)
        high = torch.where(code > number.qmax - 0.5, torch.inf, units + INSIDE)
    else:
        values = _values(number, x.device)
        at = torch.bucketize(units, _middles(values))
        gaps = torch.cat([values.new_full((1,), torch.inf), values.diff(), values.new_full((1,), torch.inf)])
        low, high = units - INSIDE * gaps[at], units + INSIDE * gaps[at + 1]
    return (x / scale).clamp(low, high) * scale


def _values(number: NumberType, device: torch.device) -> Tensor:
    return torch.tensor(_sorted_values(number), dtype=torch.float32, device=device)


@functools.cache
def _sorted_values(number: NumberType) -> tuple[float, ...]:
    codes = torch.arange(number.qmax + 1, dtype=torch.uint8, device="cpu")
    values = values_of(codes, number)
    return tuple(sorted(set(values[values.isfinite()].tolist())))


def _middles(values: Tensor) -> Tensor:
    return (values[1:] + values[:-1]) / 2
