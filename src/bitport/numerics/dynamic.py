"""Codebooks for optimizer moments, which span many powers of ten within one block.

A dynamic map with E decades holds, in decade i = 0 .. E-1, the midpoints of s equal steps from 0.1 to 1, times
10^(i-E+1):

    (0.1 + 0.9 (j + 1/2) / s) * 10^(i-E+1),  j = 0 .. s-1        s = 2^i with a sign, 2^(i+1) without

with both signs or without, plus 0 and 1: finer for larger values, 2^b entries in all. These are the 8-bit maps of
bitsandbytes (E = 7) and the signed 4-bit map of "Memory Efficient Optimizers with 4-bit States" (E = 3).

The unsigned 4-bit map of that paper is linear, 1/16 .. 16/16. It has no zero, because the update divides by the root of
the second moment.
"""

import struct


def _float32(value: float) -> float:
    (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    return float(rounded)


def dynamic_map(decades: int, signed: bool) -> tuple[float, ...]:
    entries = [0.0, 1.0]
    for i in range(decades):
        steps = 2 ** (i if signed else i + 1)
        middles = [(0.1 + 0.9 * (j + 0.5) / steps) * 10.0 ** (i - decades + 1) for j in range(steps)]
        entries += middles + [-middle for middle in middles] * signed
    return tuple(sorted(map(_float32, entries)))


DYNAMIC8 = dynamic_map(7, signed=True)
UDYNAMIC8 = dynamic_map(7, signed=False)
DYNAMIC4 = dynamic_map(3, signed=True)
ULINEAR4 = tuple((i + 1) / 16 for i in range(16))
