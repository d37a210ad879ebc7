"""float32 rounded up or down to a 16-bit float at random, so that the expected value is what was given, from random
bits that are a function of a key and the element's place: there is no generator whose state could be lost, and every
device draws the same.

bits(key, i) = mix(key ^ i), with i the index in the flattened tensor modulo 2^32, is a bijection of 32 bits. The
constants of mix are the best of two rounds that the "hash prospector" found; products of 32 and 31 bits fit in an
int64.

bfloat16, and float16 from 2^-14 on, is float32 without its last s = 16 or 13 bits: s random bits are added to those,
and the carry goes up with a probability equal to the fraction, exactly. Smaller numbers of float16 are multiples of
2^-24: their fraction is compared with 24 random bits, less than 2^-24 of a step off. NaN and infinity stay what they
are; beyond the largest number the next step up is infinity.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

CUT = {torch.bfloat16: 16, torch.float16: 13}
"""Bits of a float32 that a float type does not keep."""
_WORD = 0xFFFFFFFF
_Word = TypeVar("_Word", int, Tensor)


def mix(x: _Word) -> _Word:
    """32 bits to 32 bits, each of which depends on all."""
    x = (((x >> 16) ^ x) * 0x21F0AAAD) & _WORD
    x = (((x >> 15) ^ x) * 0x735A2D97) & _WORD
    return (x >> 15) ^ x


def key_of(*words: int) -> int:
    """32 bits from whole numbers below 2^64, of which none may be left out or exchanged for another."""
    key = 0
    for word in words:
        for half in (word & _WORD, word >> 32 & _WORD):
            key = mix(key ^ half) + 0x9E3779B9 & _WORD
    return key


def place_bits(key: int, like: Tensor, first: int = 0) -> Tensor:
    """int64 of `like`'s shape with 32 random bits in each element; `first`: the place of the first one, where `like` is
    a part of a tensor."""
    places = torch.arange(first, first + like.numel(), dtype=torch.int64, device=like.device) & _WORD
    return mix(places ^ key).view(like.shape)


def round_stochastically(x: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """float32 x in `dtype`, bfloat16 or float16; `bits` as place_bits() gives them."""
    if x.dtype != torch.float32 or dtype not in CUT:
        raise ValueError(f"float32 is rounded to bfloat16 or float16, not {x.dtype} to {dtype}")
    mask = (1 << CUT[dtype]) - 1
    carried = x.contiguous().view(torch.int32) + (bits & mask).to(torch.int32)
    rounded = (carried & ~mask).view(torch.float32)
    if dtype == torch.float16:
        steps = x.abs() * 2.0**24
        whole = steps.floor()
        up = (bits >> 8).to(torch.float32) * 2.0**-24 < steps - whole
        small = ((whole + up) * 2.0**-24).copysign(x)
        rounded = torch.where(x.abs() < 2.0**-14, small, rounded)
    return torch.where(x.isfinite(), rounded, x).to(dtype)
