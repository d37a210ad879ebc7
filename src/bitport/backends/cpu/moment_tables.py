"""Tables that describe the number type of a moment to the native library (BitportMap).

The ``rank`` of a magnitude is the number of thresholds below it: the code itself in a type without negative numbers,
the code without its sign in a float, the distance from the code of zero in a map with both signs. It is estimated, at
most one too low, by one line for each zone of equally spaced numbers:

    dynamic maps     zone z has s = 2^z numbers (2^(z+1) in a map without negative ones), from 0.1 u to u = 10^(z-E+1):
                     rank = base + (x / u - 0.1) / 0.9 s, base = s (s - 1 without negative numbers); half a number
                     lower, and used up to a quarter of a number beyond u: the next threshold is a whole one beyond
    linear map       rank = 16 x - 1, at each threshold halfway between the ranks below and above it
    e4m3             a zone for each power of two, and one below the first; a quarter lower
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bitport.errors import KernelError
from bitport.numerics import Format, NumberType, decode
from bitport.numerics.codebooks import midpoints, zero_code

LONGEST_BLOCK = 256
PLAIN, SIGN, CENTRED = range(3)
ZONES, EXPONENTS, WORDS = 16, 32, 1 << 16
DECADES = {"dynamic8": 7, "udynamic8": 7, "dynamic4": 3}
E4M3 = "float8_e4m3"


class Map(ctypes.Structure):
    """BitportMap"""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("values", "thresholds", "first", "value_bytes", "ranked_bytes")),
        *((name, ctypes.c_void_p) for name in ("borders", "slopes", "offsets", "zones")),
        *((name, ctypes.c_float) for name in ("lowest", "largest", "scale_of_zeros")),
        *((name, ctypes.c_int32) for name in ("bits", "block", "way", "zero", "positive")),
    )


class Tables:
    """The tables and ``map``, the struct that points into them."""

    def __init__(self, fmt: Format, positive: bool) -> None:
        number = fmt.number
        way = SIGN if number.kind == "float" else CENTRED if min(number.table) < 0 else PLAIN
        zero = zero_code(number.table) if number.table else 0
        values, thresholds = _values(number), _thresholds(number, positive)
        ranked = _ranked(number, thresholds[zero:] if way == CENTRED else thresholds, zero)
        lowest, *zones = _zones(number)
        self.kept = [
            _filled(values, 256, 0.0)[: 1 << number.bits].clone(),
            _filled(thresholds, 256, math.inf),
            _first(thresholds, zero),
            _bytes(_filled(values, 256, 0.0)),
            _bytes(ranked),
            *zones,
        ]
        ends = (lowest, number.max, 1.0 if number.has_zero else 0.0)
        pointers = (part.data_ptr() for part in self.kept)
        self.map = Map(*pointers, *ends, number.bits, fmt.block[1], way, zero, positive)


@functools.cache
def tables_of(fmt: Format, positive: bool) -> Tables:
    with torch.device("cpu"):
        return Tables(fmt, positive)


def _float32(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def refuses_format(fmt: Format) -> str | None:
    """Return why the library cannot handle a format, or None."""
    if fmt.dtype not in (*DECADES, "ulinear4", E4M3) or fmt.zero != "none" or fmt.scale != "float32":
        return f"codes must be of {', '.join(DECADES)}, ulinear4 or {E4M3} with float32 scales, not {fmt}"
    if fmt.block[0] != 1 or not 0 < fmt.block[1] <= LONGEST_BLOCK or fmt.block[1] % 2:
        return f"blocks must be of one row and an even number of columns up to {LONGEST_BLOCK}, not {fmt.block}"
    return None


def _values(number: NumberType) -> Tensor:
    if number.kind == "codebook":
        return _float32(number.table)
    return decode(torch.arange(256, dtype=torch.uint8), number)


def _thresholds(number: NumberType, positive: bool) -> Tensor:
    """Thresholds between codes, of the magnitude if codes have a sign. A tie between two floats goes to the even code:
    the threshold below an even code is one float32 lower. If no positive number may become zero, the first is 0."""
    if number.kind == "codebook":
        thresholds = _float32(midpoints(number.table))
    else:
        values = [number.float_value(code) for code in range(number.max_code + 1)]
        thresholds = _float32(midpoints(values))
        thresholds[1::2] = torch.nextafter(thresholds[1::2], _float32([0.0]))
    if positive and number.has_zero:
        thresholds[0] = 0.0
    return thresholds


def _first(thresholds: Tensor, of_nan: int) -> Tensor:
    """Number of thresholds below each upper half of a float32, uint8 [65536]; KernelError if one of them leaves more
    than two codes."""
    words = torch.arange(WORDS, dtype=torch.int64)
    ends = torch.stack([words << 16, (words << 16) | 0xFFFF]).to(torch.int32).view(torch.float32)
    low, high = torch.bucketize(ends.amin(0), thresholds), torch.bucketize(ends.amax(0), thresholds)
    nan = ends.isnan().any(0)
    if ((high - low > 1) & ~nan).any():
        raise KernelError("the numbers of a moment lie closer than 16 bits of a float32 tell apart")
    return torch.where(nan, of_nan, low).to(torch.uint8)


def _ranked(number: NumberType, above: Tensor, zero: int) -> Tensor:
    """int32 [256], to compare with the bits of a number rotated left by one: twice its magnitude, plus 1 if negative.
    For a threshold with bits F, ranked = 2F + 1: only larger magnitudes pass, for either sign. If F is exactly halfway
    between two numbers, ranked = 2F, so that a negative tie passes too, since it goes to the lower code. With floats a
    tie passes for neither sign."""
    bits = above.view(torch.int32) * 2 + 1
    if min(number.table, default=0.0) < 0:
        exact = torch.tensor(number.table[zero:], dtype=torch.float64)
        bits = bits - ((exact[1:] + exact[:-1]) / 2 == above.double()).int()
    return _filled(bits, 256, torch.iinfo(torch.int32).max)


def _zones(number: NumberType) -> tuple[float, Tensor, Tensor, Tensor, Tensor]:
    """Return (lowest, borders [32], slopes [16], offsets [16], zones [32])."""
    borders, zones = _float32([math.inf] * EXPONENTS), torch.zeros(EXPONENTS, dtype=torch.int32)
    slopes, offsets = _float32([0.0] * ZONES), _float32([0.0] * ZONES)
    if number.name == "ulinear4":
        slopes[0], offsets[0] = 16.0, -1.0
        return 2.0**-5, borders, slopes, offsets, zones
    if number.name == E4M3:
        for zone in range(ZONES):
            step = 2.0 ** (max(zone, 1) - number.bias - number.mantissa_bits)
            slopes[zone], offsets[zone] = 1 / step, 8 * (max(zone, 1) - 1) - 0.25
            zones[(zone - number.bias + 127) % EXPONENTS] = zone
        return 2.0**-15, borders, slopes, offsets, zones
    decades, signed = DECADES[number.name], min(number.table) < 0
    ends = []
    for zone in range(decades):
        steps, unit = 2 ** (zone if signed else zone + 1), 10.0 ** (zone - decades + 1)
        base = steps if signed else steps - 1
        slopes[zone], offsets[zone] = steps / (0.9 * unit), base - steps / 9 - 0.5
        ends.append(unit * (1 + 0.225 / steps))
    for exponent in range(-31, 1):
        at = (exponent + 127) % EXPONENTS
        low, high = 2.0**exponent, 2.0 ** (exponent + 1)
        zones[at] = sum(end <= low for end in ends[:-1])
        inside = [end for end in ends[:-1] if low < end < high]
        borders[at] = inside[0] if inside else math.inf
    return 2.0**-31, borders, slopes, offsets, zones


def _filled(values: Tensor, count: int, fill: float) -> Tensor:
    return torch.cat([values, values.new_full((count - values.numel(),), fill)])


def _bytes(entries: Tensor) -> Tensor:
    """Split 4-byte entries into byte planes [4, 256], lowest bytes first."""
    return entries.view(torch.uint8).view(-1, 4).t().contiguous()
