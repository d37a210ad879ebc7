"""The rounding of x in the native kernels against bitport.numerics: with the identity as weight, the result is the
input that the product saw."""

from __future__ import annotations

import pytest
import torch

import bitport as bp
from bitport.backends.cpu.native import Library
from bitport.numerics import fake_quantize
from bitport.ops.native_codes import ACTS, INTEGER_ACTS
from bitport.ops.product import operand
from tests.backends.taken import compiled

pytestmark = compiled
K = 240
"""Fills neither a last block of 32 nor one of 128."""
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
FLOATS = [act for act in ACTS if act and act not in INTEGER_ACTS]


def rows(dtype: torch.dtype) -> torch.Tensor:
    """Rows of all magnitudes from the smallest numbers to the largest, zeros, and midpoints between codes."""
    sizes = torch.logspace(-7, 4, 40)[:, None]
    every = torch.randn(40, K) * sizes
    every[3] = 0
    every[7, ::2] = 0
    every[9] = torch.arange(K) / 16 * 6 / 7  # ties of e2m1 and e4m3
    every[11] = every[11].abs().log2().floor().exp2()
    return every.to(dtype)


def seen(library: Library, x: torch.Tensor, act: str, scale: torch.Tensor | None = None) -> torch.Tensor:
    identity = bp.quantize_tensor(torch.eye(K), bp.preset("mxfp8-wo"))
    assert torch.equal(identity.dequantize(), torch.eye(K))
    return library.linear(x, operand(identity), None, act, scale)


def assert_equal(got: torch.Tensor, x: torch.Tensor, act: str, scale: torch.Tensor | None = None) -> None:
    """Equal up to one float32 rounding in nvfp4, where two scales are multiplied in another order."""
    expected = fake_quantize(x, act, scale)
    slack = expected.abs() * (2.0**-23 if act == "nvfp4" else 0.0)
    low, high = ((expected + sign * slack).to(x.dtype) for sign in (-1, 1))
    assert bool(((low <= got) & (got <= high)).all()), (got - expected).abs().max()


@DTYPES
@pytest.mark.parametrize("act", FLOATS)
def test_values(library: Library, act: str, dtype: torch.dtype) -> None:
    x = rows(dtype)
    assert_equal(seen(library, x, act), x, act)
    assert_equal(seen(library, x[5:6], act), x[5:6], act)
    assert_equal(seen(library, x[3:4], act), x[3:4], act)


@pytest.mark.parametrize("act", ["fp8-tensor", "nvfp4"])
def test_a_given_scale(library: Library, act: str) -> None:
    x, scale = rows(torch.bfloat16), torch.tensor([[0.03]])
    assert_equal(seen(library, x, act, scale), x, act, scale)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")], ids=["inf", "nan"])
@pytest.mark.parametrize("act", FLOATS)
def test_bad_numbers_stay_in_their_block(library: Library, act: str, bad: float) -> None:
    """A product with the identity sums over the row, so a bad block makes its row NaN, but no other."""
    x = rows(torch.float32)
    x[20, 40] = bad
    got = seen(library, x, act)
    expected = fake_quantize(x, act)
    assert bool(got[20].isnan().all())
    assert bool(got.isnan().any(1).equal(expected.isnan().any(1)))
