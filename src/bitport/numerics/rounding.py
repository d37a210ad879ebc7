"""Rounding modes, for integers in float arithmetic and for significands in integer arithmetic.

    half_even    nearest, ties to even                       toward_zero  truncate
    half_away    nearest, ties away from zero                floor, ceil  down, up
    stochastic   up with a probability equal to the fraction: the expected value is x

Stochastic rounding takes its random bits from an explicit source: a torch.Generator of the tensor's device, or an
int32 tensor of x's shape whose low 30 bits are uniformly random (the form that can be traced and replayed).
"""

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

Rounding = Literal["half_even", "half_away", "toward_zero", "floor", "ceil", "stochastic"]
RandomSource: TypeAlias = torch.Generator | Tensor | None
ROUNDINGS: tuple[str, ...] = get_args(Rounding)
RANDOM_BITS = 30


def check_rounding(mode: str) -> None:
    if mode not in ROUNDINGS:
        raise ValueError(f"unknown rounding mode {mode!r}; the modes are {', '.join(ROUNDINGS)}")


def random_bits(like: Tensor, source: RandomSource) -> Tensor:
    """int32 of `like`'s shape with 30 uniformly random bits in each element."""
    if source is None:
        raise ValueError("stochastic rounding needs generator=: a torch.Generator, or an int32 tensor of random bits")
    if not isinstance(source, Tensor):  # not isinstance(source, Generator), which dynamo cannot trace for a tensor
        return torch.randint(0, 1 << RANDOM_BITS, like.shape, generator=source, dtype=torch.int32, device=like.device)
    if source.dtype != torch.int32 or source.shape != like.shape:
        raise ValueError(
            f"random bits must be int32 of shape {tuple(like.shape)}, got {source.dtype} of shape {tuple(source.shape)}"
        )
    return source & ((1 << RANDOM_BITS) - 1)


def round_to_int(x: Tensor, mode: Rounding = "half_even", generator: RandomSource = None) -> Tensor:
    """Round x to integers, in x's dtype. The difference x - floor(x) is exact, so no mode adds a rounding error of its
    own; stochastic uses 24 random bits."""
    check_rounding(mode)
    if mode == "half_even":
        return x.round()
    if mode == "toward_zero":
        return x.trunc()
    if mode == "floor":
        return x.floor()
    if mode == "ceil":
        return x.ceil()
    if mode == "half_away":
        whole = x.trunc()
        return whole + x.sign() * ((x - whole).abs() >= 0.5)
    uniform = (random_bits(x, generator) >> (RANDOM_BITS - 24)).to(torch.float32) * 2.0**-24
    whole = x.floor()
    return whole + (uniform < (x - whole))


def shift_round(
    significand: Tensor, shift: Tensor, negative: Tensor, mode: Rounding, generator: RandomSource
) -> Tensor:
    """significand / 2^shift rounded to an integer; int32, 0 <= significand < 2^30, any shift >= 1.

    The significand is a magnitude, `negative` its sign. A shift above 30 leaves less than 2^-6 of a step; it is
    reduced to 30 by dropping low bits, with one sticky bit kept for floor and ceil if anything was dropped."""
    check_rounding(mode)
    excess = (shift - 30).clamp(min=0)
    kept = significand >> excess.clamp(max=30)
    shift = shift.clamp(max=30)
    if mode in ("floor", "ceil"):
        significand = torch.where(significand > 0, kept.clamp(min=1), 0)
    else:
        significand = kept
    one = torch.ones_like(shift) << shift
    half = one >> 1
    if mode == "half_even":
        carry = half - 1 + ((significand >> shift) & 1)
    elif mode == "half_away":
        carry = half
    elif mode == "toward_zero":
        return significand >> shift
    elif mode == "stochastic":
        carry = random_bits(significand, generator) & (one - 1)
    else:
        carry = torch.where(negative == (mode == "floor"), one - 1, 0)
    return (significand + carry) >> shift
