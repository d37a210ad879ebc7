"""Encoding of bitport's weights as blocks of ggml: the exact inverse of :mod:`bitport.interop.gguf.blocks`.

A weight gets the smallest type that represents each of its numbers. For integers, value = (code - zero) * scale, these
are::

    Q2_0, Q4_0, Q5_0, Q8_0    code - zero, signed, of 2, 4, 5, 8 bits
    Q4_1, Q5_1                codes of 4, 5 bits, and -zero * scale in float16

with the scale in float16. So zero points cost a bit in the first ones if their product is not a float16: 4 bits with
zero points are mostly Q5_0. A scale of more elements than a block is repeated. Q1_0, Q2_K to Q6_K, IQ4 and TQ2_0 accept
what was read from them, TQ2_0 also what was read from TQ1_0, and Q2_0 from PQ2_0; IQ1 to IQ3 are not written. The
global scale of NVFP4 is a separate tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from bitport.errors import ArgumentError
from bitport.interop.checks import exactly
from bitport.interop.codec import same_numbers
from bitport.interop.gguf.blocks import BLOCKS, CHUNK
from bitport.interop.gguf.factors import factors, minimum
from bitport.interop.shifts import zero_points
from bitport.numerics import from_storage, pack_bits
from bitport.schemes import Scheme
from bitport.tensor import QTensor

WHOLE = {"Q2_0": 2, "Q4_0": 4, "Q5_0": 5, "Q8_0": 8}
SUM = {"Q4_1": 4, "Q5_1": 5}
"""Types for any integers that fit -> bits per code."""


class Rows(NamedTuple):
    """``codes`` uint8 [R, B, elements]; ``scale``, ``zero`` float32 [R, B, groups], or 8-bit scales without zero."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None


def kinds(scheme: Scheme, k: int, whole: bool = False) -> list[str]:
    """The types that may hold rows of ``k`` elements, the smallest first. ``whole``: for integers, only types without
    an offset, so that all weights of a scheme have the same type."""
    fmt = scheme.weight
    integers = fmt.number.kind == "int" and fmt.number.bits > 1
    signed = min(8, fmt.number.bits + (fmt.zero != "none"))
    found = []
    for name, block in sorted(BLOCKS.items(), key=lambda item: item[1].nbytes / item[1].elements):
        if name not in JOINS:
            continue
        its = block.scheme.weight
        if name in WHOLE or name in SUM:
            fits = signed <= WHOLE[name] if name in WHOLE else fmt.zero != "none" and fmt.number.bits <= SUM[name]
            fits = fits and integers and (fmt.block[1] or k) % its.block[1] == 0 and (name in WHOLE or not whole)
        else:
            fits = same_numbers(its, fmt)
        if fits and k % block.elements == 0:
            found.append(name)
    return found


def joined(q: QTensor, whole: bool = False) -> tuple[str, Tensor]:
    """(type, uint8 [.., N, bytes of a row]); ArgumentError with the reason why each type fails."""
    reasons: dict[str, list[str]] = {}
    for name in kinds(q.scheme, q.matrix.k, whole):
        try:
            rows = [torch.cat(JOINS[name](rows), -1).flatten(1) for rows in _pieces(q, name)]
        except ArgumentError as error:
            reasons.setdefault(str(error), []).append(name)
        else:
            return name, torch.cat(rows).reshape(*q.shape[:-1], -1)
    raise ArgumentError("; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items()))


def _pieces(q: QTensor, name: str) -> Iterator[Rows]:
    block, fmt, k = BLOCKS[name], q.scheme.weight, q.matrix.k
    group = block.scheme.weight.block[1]
    zero = zero_points(q) if fmt.number.kind == "int" else None
    scale, stored = q.scale, q.qdata.flatten(0, -2)
    at_once = max(1, CHUNK // k)
    of_matrix = torch.arange(q.matrix.n) // q.matrix.block_n
    row = (torch.arange(len(stored) // q.matrix.n).unsqueeze(-1) * scale.shape[-2] + of_matrix).flatten()
    column = torch.arange(0, k, group) // q.matrix.block_k

    def spread(part: Tensor, rows: Tensor) -> Tensor:
        return part.flatten(0, -2)[rows][:, column].unflatten(-1, (-1, block.elements // group))

    for piece, rows in zip(stored.split(at_once), row.split(at_once), strict=True):
        codes = from_storage(piece, fmt.number, k).unflatten(-1, (-1, block.elements))
        if zero is None:
            yield Rows(codes, spread(scale, rows), None)
        else:
            yield Rows(codes, spread(scale, rows).float(), spread(zero, rows).float())


def _bytes(half: Tensor) -> Tensor:
    """Convert float16 [R, B] to uint8 [R, B, 2]."""
    return half.contiguous().unsqueeze(-1).view(torch.uint8)


def _half(value: Tensor, what: str, rounded: bool = True) -> Tensor:
    """Convert [R, B, 1] to uint8 [R, B, 2] of exact float16."""
    return _bytes(exactly(value.squeeze(-1), torch.float16, what, rounded))


def _planes(codes: Tensor, bits: int, run: int) -> Tensor:
    """The inverse of :func:`bitport.interop.gguf.splits.planes`."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).unsqueeze(-1)
    parts = codes.unflatten(-1, (-1, 8 // bits, run)) << shifts
    return parts.sum(-2, dtype=torch.uint8).flatten(-2)


def _whole(rows: Rows, bits: int) -> Tensor:
    """The codes with the midpoint as zero point."""
    assert rows.zero is not None
    middle, zero = 1 << bits - 1, rows.zero
    if not bool((zero == zero.round()).all()) or bool((zero.abs() > 1 << 14).any()):
        raise ArgumentError(
            "it has no zero points, and those here are no whole numbers (schemes with -g32-sym have none)"
        )
    groups = rows.codes.unflatten(-1, (zero.shape[-1], -1)).to(torch.int16)
    codes = (groups + (middle - zero).to(torch.int16).unsqueeze(-1)).flatten(-2)
    least, most = int(codes.min()) - middle, int(codes.max()) - middle
    if least < -middle or most >= middle:
        raise ArgumentError(f"it holds whole numbers from {-middle} to {middle - 1}, here are {least} to {most}")
    return codes.to(torch.uint8)


def _with_offset(rows: Rows, bits: int) -> tuple[Tensor, Tensor]:
    """(scale, minimum to subtract with ``bits`` significant bits); blocks that were constant, of the scale |minimum| or
    1, are so again, with scale 0."""
    assert rows.zero is not None
    groups = rows.codes.unflatten(-1, (rows.scale.shape[-1], -1))
    product = rows.scale * rows.zero
    constant = (groups == 0).all(-1) & ((rows.scale == product.abs()) | (rows.scale == 1))
    least = minimum(rows.scale.masked_fill(constant, 1), torch.where(constant, product, rows.zero), bits)
    return rows.scale.masked_fill(constant, 0), least


def _q1_0(rows: Rows) -> list[Tensor]:
    return [_half(rows.scale / 2, "half a scale"), pack_bits(rows.codes, 1)]


def _q2_0(rows: Rows) -> list[Tensor]:
    return [_half(-rows.scale, "a scale"), pack_bits(3 - _whole(rows, 2), 2)]


def _q4_0(rows: Rows) -> list[Tensor]:
    return [_half(rows.scale, "a scale"), _planes(_whole(rows, 4), 4, 16)]


def _q5_0(rows: Rows) -> list[Tensor]:
    return [_half(rows.scale, "a scale"), *_five(_whole(rows, 5))]


def _q8_0(rows: Rows) -> list[Tensor]:
    return [_half(rows.scale, "a scale"), _whole(rows, 8) ^ 0x80]


def _five(codes: Tensor) -> tuple[Tensor, Tensor]:
    return pack_bits(codes >> 4, 1), _planes(codes & 15, 4, 16)


def _halves(rows: Rows) -> tuple[Tensor, Tensor]:
    scale, least = _with_offset(rows, 11)
    return _half(scale, "a scale"), _half(-least, "a minimum", rounded=False)


def _q4_1(rows: Rows) -> list[Tensor]:
    return [*_halves(rows), _planes(rows.codes, 4, 16)]


def _q5_1(rows: Rows) -> list[Tensor]:
    return [*_halves(rows), *_five(rows.codes)]


def _q6_k(rows: Rows) -> list[Tensor]:
    d, s = factors(rows.scale, -128, 127)
    low, high = _planes(rows.codes & 15, 4, 64), _planes(rows.codes >> 4, 2, 32)
    return [low, high, s.to(torch.int8).view(torch.uint8), _bytes(d)]


def _q3_k(rows: Rows) -> list[Tensor]:
    d, s = factors(rows.scale, -32, 31)
    whole = (s + 32).to(torch.uint8)
    both = [_planes(whole & 15, 4, 8), _planes(whole >> 4, 2, 4)]
    return [_planes(rows.codes >> 2, 1, 32), _planes(rows.codes & 3, 2, 32), *both, _bytes(d)]


def _two(rows: Rows, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(d, m, s, t), the last two of ``bits`` bits."""
    scale, least = _with_offset(rows, 11 + bits)
    d, s = factors(scale, 0, (1 << bits) - 1)
    m, t = factors(least, 0, (1 << bits) - 1)
    return _bytes(d), _bytes(m), s.to(torch.uint8), t.to(torch.uint8)


def _q2_k(rows: Rows) -> list[Tensor]:
    d, m, s, t = _two(rows, 4)
    return [s | t << 4, _planes(rows.codes, 2, 32), d, m]


def _sixes(rows: Rows) -> list[Tensor]:
    d, m, s, t = _two(rows, 6)
    (first, after), (least, later) = s.split(4, -1), t.split(4, -1)
    return [d, m, first | after >> 4 << 6, least | later >> 4 << 6, after & 15 | (later & 15) << 4]


def _q4_k(rows: Rows) -> list[Tensor]:
    return [*_sixes(rows), _planes(rows.codes, 4, 32)]


def _q5_k(rows: Rows) -> list[Tensor]:
    return [*_sixes(rows), _planes(rows.codes >> 4, 1, 32), _planes(rows.codes & 15, 4, 32)]


def _iq4_nl(rows: Rows) -> list[Tensor]:
    return [_half(rows.scale, "a scale"), _planes(rows.codes, 4, 16)]


def _iq4_xs(rows: Rows) -> list[Tensor]:
    d, s = factors(rows.scale, -32, 31)
    whole = (s + 32).to(torch.uint8)
    return [_bytes(d), pack_bits(whole >> 4, 2), pack_bits(whole & 15, 4), _planes(rows.codes, 4, 16)]


def _tq2_0(rows: Rows) -> list[Tensor]:
    if bool((rows.codes == 0).any()):
        raise ArgumentError("it holds -1, 0 and 1, and here is -2")
    return [_planes(rows.codes - 1, 2, 32), _half(rows.scale, "a scale")]


def _mxfp4(rows: Rows) -> list[Tensor]:
    e = rows.scale.view(torch.uint8)
    if bool((e == 255).any()):
        raise ArgumentError("a scale is no number")
    return [e, _planes(rows.codes, 4, 16)]


def _nvfp4(rows: Rows) -> list[Tensor]:
    s = rows.scale.view(torch.uint8)
    if bool((s > 126).any()):
        raise ArgumentError("a scale is negative or no number")
    return [s, _planes(rows.codes, 4, 8)]


JOINS: dict[str, Callable[[Rows], list[Tensor]]] = {
    "Q1_0": _q1_0,
    "Q2_0": _q2_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "TQ2_0": _tq2_0,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}
