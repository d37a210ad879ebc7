"""The types IQ1 to IQ3 of ggml. Each run of eight or four elements is an entry of a grid, a list of the possible runs;
it is multiplied by a factor that is common to 32 elements (IQ2_XS, IQ2_S, IQ1_M: to 16)::

            elements  bytes                                                        value
    IQ2_XXS   256     d 2 | (i 4, word 4) 8                                        d * (2 s + 1) / 8 * +-grid[i]
    IQ2_XS    256     d 2 | i and signs, 2 each, 64 | s 8                          d * (2 s + 1) / 8 * +-grid[i]
    IQ2_S     256     d 2 | low i 32 | signs 32 | high i 8 | s 8                   d * (2 s + 1) / 8 * +-grid[i]
    IQ3_XXS   256     d 2 | i 64 | word 4 each, 32                                 d * (2 s + 1) / 4 * +-grid[i]
    IQ3_S     256     d 2 | low i 64 | high i 8 | signs 32 | s 4                   d * (2 s + 1) * +-grid[i]
    IQ1_S     256     d 2 | low i 32 | (high i 3 bits 4, s 3 bits, minus) 2 each   d * (2 s + 1) * (grid[i] +- 1/8)
    IQ1_M     256     low i 32 | (high i 3 bits, minus) 4 bits each | d and s 8    d * (2 s + 1) * (grid[i] +- 1/8)

A ``word`` has four times seven signs, then s in its highest four bits. The eighth of each group of signs makes the
number of minuses even. The scale has at most 16 significant bits, so that nothing is rounded.

bitport has a 4-bit code for each element. The grids, some thousands of numbers, are taken from the library ``gguf``.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from bitport.interop.gguf.splits import Split, single
from bitport.numerics import encode_codebook, number_type, unpack_bits
from bitport.optional import optional

TYPES = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
SIGN = 15
"""XOR with it negates the number of a code, since tables are sorted."""


def library(what: str) -> ModuleType:
    made: ModuleType = optional("gguf.quants", "gguf", f"{what} is read by grids of the library")
    return made


@functools.cache
def _values(name: str) -> Tensor:
    kind = getattr(library(name), name)
    kind.init_grid()
    return torch.from_numpy(kind.grid).reshape(kind.grid_shape)


@functools.cache
def _codes(name: str, dtype: str) -> Tensor:
    """The codes of a grid, uint8 [points, elements]."""
    return encode_codebook(_values(name), number_type(dtype).table)


@functools.cache
def _codes_of_one() -> Tensor:
    """uint8 [2, points, elements]: codes of eight times the grid plus 1, and minus 1."""
    return torch.stack([encode_codebook(8 * _values("IQ1_S") + one, number_type("ggml_iq2").table) for one in (1, -1)])


def _numbers(field: Tensor, size: int) -> Tensor:
    """uint8 [.., bytes] as integers of ``size`` bytes, int64."""
    places = torch.arange(0, 8 * size, 8)
    return (field.unflatten(-1, (-1, size)).long() << places).sum(-1)


def _bits(field: Tensor) -> Tensor:
    return unpack_bits(field, 1, field.shape[-1] * 8)


def _odd(d: Tensor, s: Tensor, divisor: int) -> Tensor:
    return single(d) * (2 * s + 1).float() / divisor


def _signed(codes: Tensor, minus: Tensor) -> Tensor:
    """``codes`` [.., points, elements] negated where ``minus`` [.., bits], in the same order, is set."""
    return codes.flatten(-2) ^ minus * SIGN


def _eight(seven: Tensor) -> Tensor:
    """7-bit numbers [..] as bits, uint8 [.., 8], with a parity bit that makes their sum even."""
    bits = seven.unsqueeze(-1) >> torch.arange(7) & 1
    return torch.cat([bits, bits.sum(-1, keepdim=True) & 1], -1).to(torch.uint8)


def _words(field: Tensor) -> tuple[Tensor, Tensor]:
    """Signs as bits [.., 256], and s [.., 8]."""
    words = _numbers(field, 4)
    signs = _eight(words.unsqueeze(-1) >> torch.arange(0, 28, 7) & 127)
    return signs.flatten(-3), words >> 28


def iq2_xxs(d: Tensor, both: Tensor) -> Split:
    at, words = both.unflatten(-1, (8, 2, 4)).unbind(-2)
    minus, s = _words(words.flatten(-2))
    return Split(_signed(_codes("IQ2_XXS", "ggml_iq2")[at.flatten(-2).int()], minus), _odd(d, s, 8))


def iq2_xs(d: Tensor, both: Tensor, s: Tensor) -> Split:
    numbers = _numbers(both, 2)
    codes = _signed(_codes("IQ2_XS", "ggml_iq2")[numbers & 511], _eight(numbers >> 9).flatten(-2))
    return Split(codes, _odd(d, unpack_bits(s, 4, 16), 8))


def iq2_s(d: Tensor, low: Tensor, signs: Tensor, high: Tensor, s: Tensor) -> Split:
    at = low.int() | unpack_bits(high, 2, 32).int() << 8
    return Split(_signed(_codes("IQ2_S", "ggml_iq2")[at], _bits(signs)), _odd(d, unpack_bits(s, 4, 16), 8))


def iq3_xxs(d: Tensor, at: Tensor, words: Tensor) -> Split:
    minus, s = _words(words)
    return Split(_signed(_codes("IQ3_XXS", "ggml_iq3")[at.int()], minus), _odd(d, s, 4))


def iq3_s(d: Tensor, low: Tensor, high: Tensor, signs: Tensor, s: Tensor) -> Split:
    at = low.int() | _bits(high).int() << 8
    return Split(_signed(_codes("IQ3_S", "ggml_iq3s")[at], _bits(signs)), _odd(d, unpack_bits(s, 4, 8), 1))


def iq1_s(d: Tensor, low: Tensor, rest: Tensor) -> Split:
    numbers = _numbers(rest, 2).unsqueeze(-1)
    at = low.long() | (numbers >> torch.arange(0, 12, 3) & 7).flatten(-2) << 8
    codes = _codes_of_one()[(numbers >> 15).expand(*numbers.shape[:-1], 4).flatten(-2), at]
    return Split(codes.flatten(-2), _odd(d, (numbers >> 12 & 7).squeeze(-1), 8))


def iq1_m(low: Tensor, rest: Tensor, scales: Tensor) -> Split:
    """d is in the highest four bits of four numbers, the lowest part first."""
    fours, numbers = unpack_bits(rest, 4, 32).long(), _numbers(scales, 2)
    codes = _codes_of_one()[fours >> 3, low.long() | (fours & 7) << 8]
    d = (numbers >> 12 << torch.arange(0, 16, 4)).sum(-1, keepdim=True).to(torch.int32)
    halves = torch.stack([d & 255, d >> 8], -1).to(torch.uint8).flatten(-2)
    s = (numbers.unsqueeze(-1) >> torch.arange(0, 12, 3) & 7).flatten(-2)
    return Split(codes.flatten(-2), _odd(halves, s, 8))
