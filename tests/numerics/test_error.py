import math

import pytest
import torch

from bitport.numerics import sqnr


def test_by_hand() -> None:
    reference, value = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.5])
    assert sqnr(reference, value).item() == pytest.approx(20.0, abs=1e-12)  # |ref| = 5, |error| = 0.5


def test_ends() -> None:
    x, zero = torch.ones(3), torch.zeros(3)
    assert sqnr(x, x).item() == math.inf
    assert sqnr(zero, zero).item() == math.inf
    assert sqnr(zero, x).item() == -math.inf
    assert sqnr(torch.zeros(0), torch.zeros(0)).item() == math.inf
    assert sqnr(x, torch.tensor([1.0, math.nan, 1.0])).isnan()


def test_computed_in_float64() -> None:
    """In float32 the square of 1e30 overflows, and an error of 2^-30 would be lost."""
    assert sqnr(torch.tensor([1e30]), torch.tensor([0.9e30])).item() == pytest.approx(20, abs=1e-4)
    one = torch.ones(1, dtype=torch.float64)
    assert sqnr(one, one + 2.0**-30).item() == pytest.approx(20 * 30 * math.log10(2), abs=1e-6)
