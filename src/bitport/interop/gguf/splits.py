"""Decoding of ggml's block types. A row of a matrix is a sequence of blocks, a block is::

            elements  bytes                                                    value
    Q1_0      128     d 2 | low 16                                             d * (2 * q - 1)
    Q2_0       64     d 2 | low 16                                             d * (q - 1)
    PQ2_0     128     d 2 | low 32                                             d * (q - 1)
    Q8_0       32     d 2 | q int8 32                                          d * q
    Q4_0       32     d 2 | low 16                                             d * (q - 8)
    Q5_0       32     d 2 | high 4 | low 16                                    d * (q - 16)
    Q4_1       32     d 2 | m 2 | low 16                                       d * q + m
    Q5_1       32     d 2 | m 2 | high 4 | low 16                              d * q + m
    Q6_K      256     low 128 | high 64 | s int8 16 | d 2                      d * s * (q - 32)
    Q3_K      256     high 32 | low 64 | s 12 | d 2                            d * (s - 32) * (q - 4)
    Q2_K      256     s, t 16 | low 64 | d 2 | m 2                             d * s * q - m * t
    Q4_K      256     d 2 | m 2 | s, t 12 | low 128                            d * s * q - m * t
    Q5_K      256     d 2 | m 2 | s, t 12 | high 32 | low 128                  d * s * q - m * t
    MXFP4      32     e 1 | low 16                                             e2m1(q) * 2^(e - 127)
    NVFP4      64     s 4 | low 8, four times                                  e2m1(q) * e4m3(s)
    IQ4_NL     32     d 2 | low 16                                             d * table[q]
    IQ4_XS    256     d 2 | high s 2 | low s 4 | low 128                       d * (s - 32) * table[q]
    TQ2_0     256     low 64 | d 2                                             d * (q - 1)
    TQ1_0     256     threes 52 | d 2                                          d * (q - 1)

d and m are float16; s and t belong to 16 elements of a block (Q4_K, Q5_K, IQ4_XS: 32). A tensor of NVFP4 is multiplied
by a separate scale, or one per expert, which is another tensor (names). ``low`` and ``high`` are the bits of q, where
``high`` is present the upper ones, in the layout of :func:`planes`; in Q1_0 and Q2_0 they follow each other. PQ2_0 is
Q2_0 in larger blocks, as in Prism's version of llama.cpp. For IQ1 to IQ3 see
:mod:`bitport.interop.gguf.grids`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bitport.errors import CheckpointError
from bitport.numerics import unpack_bits


class Split(NamedTuple):
    """Decoded blocks: ``codes`` uint8 [.., elements]; ``scale``, ``offset`` [.., groups]. With an offset the value is
    code * scale + offset."""

    codes: Tensor
    scale: Tensor
    offset: Tensor | None = None


def half(field: Tensor) -> Tensor:
    return field.contiguous().view(torch.float16)


def single(field: Tensor) -> Tensor:
    return half(field).to(torch.float32)


def planes(field: Tensor, bits: int, run: int) -> Tensor:
    """Codes from planes: ``run`` bytes hold the codes of ``run`` elements in their lowest bits, those of the next
    ``run`` elements in the bits above, and so on. With 4 bits and a run of 16, elements by byte (highest bits first)::

        byte 0   byte 1   ..   byte 15
        16 | 0   17 | 1        31 | 15
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=field.device).unsqueeze(-1)
    return (field.unflatten(-1, (-1, 1, run)) >> shifts & (1 << bits) - 1).flatten(-3)


def q1_0(d: Tensor, low: Tensor) -> Split:
    """The codes of int1 are -1/2 and 1/2."""
    scale = half(d) * 2
    if bool((scale.isinf() & ~half(d).isinf()).any()):
        raise CheckpointError("twice a scale of Q1_0 is no float16, as no weight has; fetch the file again")
    return Split(unpack_bits(low, 1, 8 * low.shape[-1]), scale)


def q2_0(d: Tensor, low: Tensor) -> Split:
    """d * (q - 1) = -d * (3 - q - 2), where 2 is the midpoint of int2."""
    return Split(3 - unpack_bits(low, 2, 4 * low.shape[-1]), -half(d))


def q8_0(d: Tensor, codes: Tensor) -> Split:
    return Split(codes ^ 0x80, half(d))


def q4_0(d: Tensor, low: Tensor) -> Split:
    return Split(planes(low, 4, 16), half(d))


def q5_0(d: Tensor, high: Tensor, low: Tensor) -> Split:
    return Split(planes(low, 4, 16) | unpack_bits(high, 1, 32) << 4, half(d))


def q4_1(d: Tensor, m: Tensor, low: Tensor) -> Split:
    return Split(planes(low, 4, 16), single(d), single(m))


def q5_1(d: Tensor, m: Tensor, high: Tensor, low: Tensor) -> Split:
    return Split(q5_0(d, high, low).codes, single(d), single(m))


def q6_k(low: Tensor, high: Tensor, s: Tensor, d: Tensor) -> Split:
    return Split(planes(low, 4, 64) | planes(high, 2, 32) << 4, single(d) * s.view(torch.int8))


def q3_k(high: Tensor, low: Tensor, s: Tensor, d: Tensor) -> Split:
    """s: the low 4 bits of 16 numbers in 8 bytes, then their high 2 bits in 4."""
    factors = planes(s[..., :8], 4, 8) | planes(s[..., 8:], 2, 4) << 4
    return Split(planes(low, 2, 32) | planes(high, 1, 32) << 2, single(d) * (factors.to(torch.int8) - 32))


def q2_k(both: Tensor, low: Tensor, d: Tensor, m: Tensor) -> Split:
    """both: s in the low 4 bits of a byte, t in the high ones."""
    return Split(planes(low, 2, 32), single(d) * (both & 15), -single(m) * (both >> 4))


def q4_k(d: Tensor, m: Tensor, both: Tensor, low: Tensor) -> Split:
    s, t = _sixes(both)
    return Split(planes(low, 4, 32), single(d) * s, -single(m) * t)


def q5_k(d: Tensor, m: Tensor, both: Tensor, high: Tensor, low: Tensor) -> Split:
    codes, scale, offset = q4_k(d, m, both, low)
    return Split(codes | planes(high, 1, 32) << 4, scale, offset)


def _sixes(both: Tensor) -> tuple[Tensor, Tensor]:
    """Eight s and eight t of 6 bits from 12 bytes; digits are bit numbers::

    byte i = 0 .. 3     s[i+4] 5 4 | s[i] 5 4 3 2 1 0
    byte i + 4          t[i+4] 5 4 | t[i] 5 4 3 2 1 0
    byte i + 8          t[i+4] 3 2 1 0 | s[i+4] 3 2 1 0
    """
    first, second, rest = both.split(4, -1)
    s = torch.cat([first & 63, rest & 15 | first >> 6 << 4], -1)
    return s, torch.cat([second & 63, rest >> 4 | second >> 6 << 4], -1)


def iq4_xs(d: Tensor, high: Tensor, few: Tensor, low: Tensor) -> Split:
    """Each s has 4 bits in ``few`` and 2 in ``high``."""
    s = unpack_bits(few, 4, 8) | unpack_bits(high, 2, 8) << 4
    return Split(planes(low, 4, 16), single(d) * (s.to(torch.int8) - 32))


def tq2_0(low: Tensor, d: Tensor) -> Split:
    return Split(_ternary(planes(low, 2, 32)), half(d))


def tq1_0(first: Tensor, second: Tensor, third: Tensor, d: Tensor) -> Split:
    """Five q of 32, then of 16 elements, and four of 4, are the digits of a base 3 number, the first the highest; a
    byte is that number / 3^5 * 256, rounded up. Multiplying by 3 carries out the first digit."""
    digits = [_digits(first, 5), _digits(second, 5), _digits(third, 4)]
    return Split(_ternary(torch.cat(digits, -1)), half(d))


def _digits(field: Tensor, count: int) -> Tensor:
    powers = torch.tensor([3**at for at in range(count)], dtype=torch.uint8, device=field.device).unsqueeze(-1)
    return ((field.unsqueeze(-2) * powers).to(torch.int16) * 3 >> 8).to(torch.uint8).flatten(-2)


def _ternary(digits: Tensor) -> Tensor:
    if bool((digits > 2).any()):
        raise CheckpointError("a code of TQ2_0 is 3, and stands for no number; fetch the file again")
    return digits + 1


def mxfp4(e: Tensor, low: Tensor) -> Split:
    if bool((e == 255).any()):
        raise CheckpointError("a block of MXFP4 has the exponent 255, which is no number; fetch the file again")
    return Split(planes(low, 4, 16), e.contiguous().view(torch.float8_e8m0fnu))


def nvfp4(s: Tensor, low: Tensor) -> Split:
    """llama.cpp halves the scale and doubles the codes, and treats the scale 127, elsewhere NaN, as 0."""
    if bool((s > 127).any()):
        raise CheckpointError("a scale of NVFP4 is negative, and has no sign; fetch the file again")
    return Split(planes(low, 4, 8), s.masked_fill(s == 127, 0).view(torch.float8_e4m3fn))
