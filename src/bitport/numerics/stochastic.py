"""Stochastic rounding of float32 to a 16-bit float: the expected value equals the input. The random bits are a function
of a key and the element's index, so there is no generator state to lose, and every device draws the same bits.

bits(key, i) = mix(key ^ i), with i the index in the flattened tensor modulo 2^32, is a bijection of 32 bits. The
constants of mix are the best two-round ones that the "hash prospector" found; products of 32 and 31 bits fit in an
int64.

bfloat16, and float16 from 2^-14 on, is float32 without its last s = 16 or 13 bits: s random bits are added to those,
and they carry with a probability exactly equal to the fraction. float16 subnormals are multiples of 2^-24: their
fraction is compared with 24 random bits, which is less than 2^-24 of a step off. NaN and infinity are preserved; above
the largest finite value the next step up is infinity.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

CUT = {torch.bfloat16: 16, torch.float16: 13}
"""Number of float32 mantissa bits that each dtype drops."""
_WORD = 0xFFFFFFFF
_Word = TypeVar("_Word", int, Tensor)


def mix(x: _Word) -> _Word:
    """Hash 32 bits to 32 bits; every output bit depends on all input bits."""
    x = (((x >> 16) ^ x) * 0x21F0AAAD) & _WORD
    x = (((x >> 15) ^ x) * 0x735A2D97) & _WORD
    return (x >> 15) ^ x


def key_of(*words: int) -> int:
    """Hash integers below 2^64 to a 32-bit key that depends on each of them and on their order."""
    key = 0
    for word in words:
        for half in (word & _WORD, word >> 32 & _WORD):
            key = mix(key ^ half) + 0x9E3779B9 & _WORD
    return key


def place_bits(key: int, like: Tensor, first: int = 0) -> Tensor:
    """int64 of `like`'s shape with 32 random bits per element; `first`: index of the first element if `like` is part of
    a larger tensor."""
    places = torch.arange(first, first + like.numel(), dtype=torch.int64, device=like.device) & _WORD
    return mix(places ^ key).view(like.shape)


def round_stochastically(x: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """Round float32 x to `dtype`, bfloat16 or float16; `bits` come from :func:`place_bits`."""
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
