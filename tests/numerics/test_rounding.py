import math
from decimal import ROUND_CEILING, ROUND_DOWN, ROUND_FLOOR, ROUND_HALF_EVEN, ROUND_HALF_UP, Decimal

import pytest
import torch

from bitport.numerics import Rounding, round_to_int

DECIMAL: dict[Rounding, str] = {
    "half_even": ROUND_HALF_EVEN,
    "half_away": ROUND_HALF_UP,
    "toward_zero": ROUND_DOWN,
    "floor": ROUND_FLOOR,
    "ceil": ROUND_CEILING,
}


@pytest.mark.parametrize("mode", DECIMAL)
def test_against_decimal_arithmetic(mode: Rounding) -> None:
    below_half = math.nextafter(0.5, 0)
    points = [0.5, 1.5, 2.5, 126.5, 0.25, 0.75, 1.0, 1e-40, 8388607.5, 16777216.0, below_half]
    x = torch.tensor([*points, *(-p for p in points)])
    noise = torch.randn(2000, generator=torch.Generator().manual_seed(0)) * 50
    x = torch.cat([x, x.nextafter(torch.tensor(0.0)), noise])
    expected = [float(Decimal(v).to_integral_value(DECIMAL[mode])) for v in x.tolist()]
    assert round_to_int(x, mode).tolist() == expected


def test_stochastic_is_unbiased_and_stays_between_neighbours() -> None:
    x = torch.tensor([-2.75, -0.125, 0.0, 0.5, 3.0, 100.25])
    draws = 40_000
    rounded = round_to_int(x.expand(draws, 6), "stochastic", torch.Generator().manual_seed(0)).double()
    assert torch.equal(rounded.amin(0), x.floor().double())
    assert torch.equal(rounded.amax(0), x.ceil().double())
    fraction = (x - x.floor()).double()
    bound = 5 * (fraction * (1 - fraction) / draws).sqrt()
    assert ((rounded.mean(0) - x).abs() <= bound).all()


def test_random_bits_are_checked() -> None:
    x = torch.zeros(3)
    with pytest.raises(ValueError, match=r"int32 of shape \(3,\)"):
        round_to_int(x, "stochastic", torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="int64"):
        round_to_int(x, "stochastic", torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="generator"):
        round_to_int(x, "stochastic")
    with pytest.raises(ValueError, match="up"):
        round_to_int(x, "up")  # type: ignore[arg-type]
