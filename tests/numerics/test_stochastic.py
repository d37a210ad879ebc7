"""Stochastic rounding to 16-bit floats: to a neighbour, upwards with the right probability, the same on every
device."""

from __future__ import annotations

import math

import pytest
import torch

from bitport.numerics.stochastic import key_of, mix, place_bits, round_stochastically

DTYPES = [torch.bfloat16, torch.float16]


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Numbers of all magnitudes, subnormals included, and of both signs."""
    lowest = math.log2(torch.finfo(dtype).smallest_normal) - 9
    sizes = torch.exp2(torch.empty(20000, dtype=torch.float64).uniform_(lowest, 15))
    return (sizes * torch.randn(20000).sign()).float()


def test_bits_are_those_of_plain_integers() -> None:
    key = key_of(1, 2, 3)
    bits = place_bits(key, torch.empty(3, 5)).flatten().tolist()
    for place, got in enumerate(bits):
        x = place ^ key
        x = ((x ^ x >> 16) * 0x21F0AAAD) % 2**32
        x = ((x ^ x >> 15) * 0x735A2D97) % 2**32
        assert got == x ^ x >> 15 == mix(place ^ key)


def test_every_bit_is_even_and_keys_differ() -> None:
    """Each bit is within 16 standard deviations of a fair coin; a key depends on the words and their order."""
    count = 1 << 16
    for key in (0, key_of(0, 0, 1, 0), key_of(7, 1, 2, 3)):
        bits = place_bits(key, torch.empty(count))
        for at in range(32):
            assert abs(((bits >> at) & 1).sum().item() - count / 2) < 16 * math.sqrt(count) / 2
    keys = {key_of(*words) for words in ((0, 1), (1, 0), (0, 0), (1, 1), (1 << 40, 0), (0,), (0, 0, 0))}
    assert len(keys) == 7


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_goes_to_a_neighbour(dtype: torch.dtype) -> None:
    x = numbers(dtype)
    rounded = round_stochastically(x, dtype, place_bits(key_of(5), x))
    nearest = x.to(dtype)
    infinity = torch.full_like(nearest, math.inf)
    below = torch.where(nearest.float() > x, torch.nextafter(nearest, -infinity), nearest)
    above = torch.where(nearest.float() < x, torch.nextafter(nearest, infinity), nearest)
    assert ((rounded == below) | (rounded == above)).all()
    assert (rounded == below).any()
    assert (rounded == above).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_needs_no_rounding_stays(dtype: torch.dtype) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = every.float()
    rounded = round_stochastically(x, dtype, place_bits(key_of(1), x))
    assert torch.equal(rounded.view(torch.int16)[~every.isnan()], every.view(torch.int16)[~every.isnan()])
    assert rounded[every.isnan()].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [1.0 + 2.0**-12, -3.3, 5e-6, 300.1])
def test_the_mean_is_the_number(dtype: torch.dtype, value: float) -> None:
    """The mean of n draws between neighbours a step apart is off by more than 5 step / (2 sqrt(n)) in one of a million
    runs; keys differ, as they do from step to step."""
    n = 1 << 12
    x = torch.full((n,), value)
    drawn = torch.cat([round_stochastically(x, dtype, place_bits(key_of(step), x)).double() for step in range(16)])
    assert abs(drawn.mean() - x[0].double()) <= 5 * (drawn.max() - drawn.min()) / (2 * math.sqrt(16 * n))
    assert drawn.unique().numel() == 2


def test_an_element_is_rounded_anew_in_every_step() -> None:
    """One element with many keys, within the same bound."""
    n, x = 4000, torch.full((3,), 1 + 2.0**-9 + 2.0**-11)
    drawn = torch.stack([round_stochastically(x, torch.bfloat16, place_bits(key_of(0, 4, t, 0), x)) for t in range(n)])
    step = 2.0**-7
    assert ((drawn.double().mean(0) - x.double()).abs() <= 5 * step / (2 * math.sqrt(n))).all()


def test_other_dtypes_are_refused() -> None:
    x = torch.ones(3)
    with pytest.raises(ValueError, match=r"to bfloat16 or float16, not torch.float32 to torch.float32"):
        round_stochastically(x, torch.float32, place_bits(0, x))
    with pytest.raises(ValueError, match=r"not torch.float64 to torch.bfloat16"):
        round_stochastically(x.double(), torch.bfloat16, place_bits(0, x))
