"""Codes in 32-bit words, least significant bits first: how GPTQ, AWQ, compressed-tensors and MLX store integers; and
codes that lie rows apart, as HQQ, quanto and BitNet have them.

A sequence of words is one little-endian number, and so the same bytes as bitport's bit stream; a code may cross a word
boundary (3, 5, 6 and 7 bits). Formats differ in the axis along which codes are packed, and in offsets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bitport.errors import CheckpointError
from bitport.numerics.packing import pack_bits, packed_size, unpack_bits


def to_stream(words: Tensor, k: int, bits: int) -> Tensor:
    """Convert int32 [.., words] to bitport's bit stream of ``k`` codes, uint8 [.., bytes]: the same bytes, without the
    padding of the last word."""
    if words.dtype != torch.int32 or words.shape[-1] != word_count(k, bits):
        raise CheckpointError(
            f"{k} codes of {bits} bits are {word_count(k, bits)} words of int32, not {words.dtype} {list(words.shape)}"
        )
    stream = words.flatten().contiguous().view(torch.uint8).reshape(*words.shape[:-1], 4 * words.shape[-1])
    return stream[..., : packed_size(k, bits)].contiguous()


def from_stream(stream: Tensor, k: int, bits: int) -> Tensor:
    """The inverse: padded with zeros to whole words."""
    count = word_count(k, bits)
    filled = torch.nn.functional.pad(stream, (0, 4 * count - stream.shape[-1]))
    # Flatten first: the only row of a matrix may have any stride, which prevents a view as words.
    return filled.flatten().view(torch.int32).reshape(*stream.shape[:-1], count)


def to_codes(words: Tensor, k: int, bits: int) -> Tensor:
    """Convert int32 [.., words] to uint8 codes [.., k]."""
    return unpack_bits(to_stream(words, k, bits), bits, k)


def from_codes(codes: Tensor, bits: int) -> Tensor:
    """Convert uint8 codes [.., k] to int32 [.., words]."""
    return from_stream(pack_bits(codes, bits), codes.shape[-1], bits)


PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
"""Bits of a code -> how many of them lie in each plane, the lowest first."""


def of_planes(words: Tensor, bits: int) -> Tensor:
    """Convert int32 [.., words] to uint8 codes, of which 32 take ``bits`` words: those of the first plane, then the
    next, so that no part of a code crosses a word boundary. With 5 bits::

        word 0..3    bits 3 2 1 0 of codes 0..7, 8..15, 16..23, 24..31
        word 4       bit 4 of codes 0..31
    """
    if words.dtype != torch.int32 or words.shape[-1] % bits:
        raise CheckpointError(
            f"32 codes of {bits} bits are {bits} words of int32 in planes, not {words.dtype} {list(words.shape)}"
        )
    blocks, low = words.unflatten(-1, (-1, bits)), 0
    codes = torch.zeros(*blocks.shape[:-1], 32, dtype=torch.uint8)
    for width, plane in zip(PLANES[bits], blocks.split(PLANES[bits], -1), strict=True):
        codes |= to_codes(plane, 32, width) << low
        low += width
    return codes.flatten(-2)


def of_rows_apart(packed: Tensor, shifts: Sequence[int], width: int) -> Tensor:
    """Convert [rows / c, ..] to uint8 codes [rows, ..]: an element holds c codes of ``width`` bits, which begin at bits
    ``shifts`` and are rows / c rows apart."""
    return torch.cat([(packed >> shift & (1 << width) - 1).to(torch.uint8) for shift in shifts])


def to_rows_apart(codes: Tensor, shifts: Sequence[int], dtype: torch.dtype = torch.uint8) -> Tensor:
    """The inverse, for codes [rows, columns]: rows / c is rounded up, and zeros follow the last row."""
    count = -(-len(codes) // len(shifts))
    filled = torch.nn.functional.pad(codes, (0, 0, 0, count * len(shifts) - len(codes))).to(dtype)
    packed = torch.zeros(count, codes.shape[1], dtype=dtype)
    for shift, rows in zip(shifts, filled.split(count), strict=True):
        packed |= rows << shift
    return packed


def word_count(k: int, bits: int) -> int:
    return -(-k * bits // 32)
