"""The block types of ggml, which GGUF files hold, in bitport's form. A row of a matrix is a run of blocks, a block is::

            elements  bytes                                                    value
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

d and m are float16; s and t belong to 16 elements of a block (Q4_K, Q5_K: 32). ``low`` and ``high`` are the bits of q,
where ``high`` is there the upper ones; how they lie says :func:`_planes`.

The first five of one factor, and Q6_K, Q3_K and MXFP4, are what they are here too: d * s has at most 18 significant
bits. Those with a sum need a zero point, (q - z) * d with z = -m / d, and z is rounded to float32. So a value v that
llama.cpp computes as d * q + m, rounded once, is off from ours by at most 2^-24 * (|m| + 3 |v|), a little more than the
rounding of either. Where d is 0 the block is the constant m, kept as
(0 - -m) * 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from bitport.errors import CheckpointError
from bitport.numerics import Quantized, pack_bits, unpack_bits
from bitport.schemes import Scheme, preset

CHUNK = 1 << 24
"""Elements that are taken apart at once: each takes some bytes meanwhile."""
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Split(NamedTuple):
    """Blocks taken apart: ``codes`` uint8 [.., elements]; ``scale``, ``offset`` [.., groups]. With an offset the value
    is code * scale + offset."""

    codes: Tensor
    scale: Tensor
    offset: Tensor | None = None


class Block(NamedTuple):
    elements: int
    fields: tuple[int, ...]
    """Bytes of each."""
    scheme: Scheme
    split: Callable[..., Split]
    """Of the fields, each uint8 [.., bytes]."""

    @property
    def nbytes(self) -> int:
        return sum(self.fields)


def decoded(block: Block, raw: Tensor) -> Quantized:
    """``raw``: uint8 [.., N, bytes of a row], whole blocks."""
    at_once = max(1, CHUNK // (raw.shape[-1] // block.nbytes * block.elements))
    pieces = [_decoded(block, rows) for rows in raw.flatten(0, -2).split(at_once)]
    data, scale, zero, _ = (
        None if each[0] is None else torch.cat(each).unflatten(0, raw.shape[:-1]) for each in zip(*pieces, strict=True)
    )
    assert data is not None
    assert scale is not None
    return Quantized(data, scale, zero)


def _decoded(block: Block, rows: Tensor) -> Quantized:
    blocks = rows.unflatten(-1, (-1, block.nbytes))
    codes, scale, offset = block.split(*blocks.split(block.fields, -1))
    zero = None
    if offset is not None:
        codes, scale, zero = _with_zero(codes, scale, offset)
    data = pack_bits(codes.flatten(-2), block.scheme.weight.number.bits)
    return Quantized(data, scale.flatten(-2), None if zero is None else zero.flatten(-2))


def _with_zero(codes: Tensor, scale: Tensor, offset: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    constant = scale == 0
    groups = codes.unflatten(-1, (scale.shape[-1], -1)).masked_fill(constant.unsqueeze(-1), 0)
    zero = torch.where(constant, -offset, -offset / scale)
    return groups.flatten(-2), scale.masked_fill(constant, 1), zero


def _half(field: Tensor) -> Tensor:
    return field.contiguous().view(torch.float16)


def _single(field: Tensor) -> Tensor:
    return _half(field).to(torch.float32)


def _planes(field: Tensor, bits: int, run: int) -> Tensor:
    """Codes lie by planes: ``run`` bytes hold the codes of ``run`` elements in their lowest bits, those of the next
    ``run`` elements in the bits above, and so on. With 4 bits and a run of 16, elements by byte (highest bits first)::

        byte 0   byte 1   ..   byte 15
        16 | 0   17 | 1        31 | 15
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=field.device).unsqueeze(-1)
    return (field.unflatten(-1, (-1, 1, run)) >> shifts & (1 << bits) - 1).flatten(-3)


def _q8_0(d: Tensor, codes: Tensor) -> Split:
    return Split(codes ^ 0x80, _half(d))


def _q4_0(d: Tensor, low: Tensor) -> Split:
    return Split(_planes(low, 4, 16), _half(d))


def _q5_0(d: Tensor, high: Tensor, low: Tensor) -> Split:
    return Split(_planes(low, 4, 16) | unpack_bits(high, 1, 32) << 4, _half(d))


def _q4_1(d: Tensor, m: Tensor, low: Tensor) -> Split:
    return Split(_planes(low, 4, 16), _single(d), _single(m))


def _q5_1(d: Tensor, m: Tensor, high: Tensor, low: Tensor) -> Split:
    return Split(_q5_0(d, high, low).codes, _single(d), _single(m))


def _q6_k(low: Tensor, high: Tensor, s: Tensor, d: Tensor) -> Split:
    return Split(_planes(low, 4, 64) | _planes(high, 2, 32) << 4, _single(d) * s.view(torch.int8))


def _q3_k(high: Tensor, low: Tensor, s: Tensor, d: Tensor) -> Split:
    """s: the low 4 bits of 16 numbers in 8 bytes, then their high 2 bits in 4."""
    factors = _planes(s[..., :8], 4, 8) | _planes(s[..., 8:], 2, 4) << 4
    return Split(_planes(low, 2, 32) | _planes(high, 1, 32) << 2, _single(d) * (factors.to(torch.int8) - 32))


def _q2_k(both: Tensor, low: Tensor, d: Tensor, m: Tensor) -> Split:
    """both: s in the low 4 bits of a byte, t in the high ones."""
    return Split(_planes(low, 2, 32), _single(d) * (both & 15), -_single(m) * (both >> 4))


def _q4_k(d: Tensor, m: Tensor, both: Tensor, low: Tensor) -> Split:
    s, t = _sixes(both)
    return Split(_planes(low, 4, 32), _single(d) * s, -_single(m) * t)


def _q5_k(d: Tensor, m: Tensor, both: Tensor, high: Tensor, low: Tensor) -> Split:
    codes, scale, offset = _q4_k(d, m, both, low)
    return Split(codes | _planes(high, 1, 32) << 4, scale, offset)


def _sixes(both: Tensor) -> tuple[Tensor, Tensor]:
    """Eight s and eight t of 6 bits in 12 bytes, the digit saying whose bits they are::

    byte i = 0 .. 3     s[i+4] 5 4 | s[i] 5 4 3 2 1 0
    byte i + 4          t[i+4] 5 4 | t[i] 5 4 3 2 1 0
    byte i + 8          t[i+4] 3 2 1 0 | s[i+4] 3 2 1 0
    """
    first, second, rest = both.split(4, -1)
    s = torch.cat([first & 63, rest & 15 | first >> 6 << 4], -1)
    return s, torch.cat([second & 63, rest >> 4 | second >> 6 << 4], -1)


def _mxfp4(e: Tensor, low: Tensor) -> Split:
    if bool((e == 255).any()):
        raise CheckpointError("a block of MXFP4 has the exponent 255, which is no number; fetch the file again")
    return Split(_planes(low, 4, 16), e.contiguous().view(torch.float8_e8m0fnu))


def _blocks() -> Iterator[tuple[str, Block]]:
    for name, elements, fields, scheme, split in (
        ("Q4_0", 32, (2, 16), "int4-g32-sym", _q4_0),
        ("Q4_1", 32, (2, 2, 16), "int4-g32-fzero", _q4_1),
        ("Q5_0", 32, (2, 4, 16), "int5-g32-sym", _q5_0),
        ("Q5_1", 32, (2, 2, 4, 16), "int5-g32-fzero", _q5_1),
        ("Q8_0", 32, (2, 32), "int8-g32", _q8_0),
        ("Q2_K", 256, (16, 64, 2, 2), "int2-g16-fzero", _q2_k),
        ("Q3_K", 256, (32, 64, 12, 2), "int3-g16-sym", _q3_k),
        ("Q4_K", 256, (2, 2, 12, 128), "int4-g32-fzero", _q4_k),
        ("Q5_K", 256, (2, 2, 12, 32, 128), "int5-g32-fzero", _q5_k),
        ("Q6_K", 256, (128, 64, 16, 2), "int6-g16-sym", _q6_k),
        ("MXFP4", 32, (1, 16), "mxfp4-wo", _mxfp4),
    ):
        yield name, Block(elements, fields, preset(scheme), split)


BLOCKS: dict[str, Block] = dict(_blocks())
