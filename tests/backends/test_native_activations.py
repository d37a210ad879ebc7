"""The activations after a native product, in every variant, over their whole range against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bitport.backends import cpu
from bitport.numerics import quantize
from bitport.ops import OPS, Weight
from bitport.ops.linear_then import FOLLOWING, follow
from bitport.schemes import preset
from tests.backends.products import products
from tests.backends.taken import compiled, takes

LIBRARY = cpu.LIBRARY
pytestmark = [compiled, pytest.mark.usefixtures("own_tables")]


def identity(n: int) -> Weight:
    """Exactly one on the diagonal: int8 codes of 64 with scale 1/64, so that x W^T is x."""
    scheme = preset("int8-sym")
    parts = quantize(torch.eye(n) * 127 / 64, scheme.weight)
    plain = Weight.of(parts, scheme.weight, n, n)
    plain.data.copy_((torch.eye(n) * 64 + 128).to(torch.uint8))
    plain.scale.fill_(1 / 64)
    assert torch.equal(plain.dense(torch.float32), torch.eye(n))
    return plain.to_layout("cpu_tiles")


def exponent(z: Tensor, then: str) -> Tensor:
    """The e for which the tail of the function is about exp(-e)."""
    if then == "gelu":
        return z * z / 2
    return z if then == "silu" else math.sqrt(8 / math.pi) * (z + 0.044715 * z**3)


@pytest.mark.parametrize("then", FOLLOWING)
def test_the_whole_range(isa: str, then: str) -> None:
    """Both signs, from tiny numbers, where f is half its argument, to large ones, where f is the argument or 0."""
    n = 32
    size = torch.cat([torch.logspace(-30, 0, 1600), torch.linspace(1, 14, 6400), torch.logspace(1.2, 30, 192)])
    z = torch.cat([size, -size, torch.zeros(2), torch.full((30,), float(2**-126))]).reshape(-1, n)
    y = takes(lambda: OPS["linear_then"].overload(z, *identity(n), None, then, None)).double()
    z = z.double()
    a = z.abs()
    whole = {"gelu": torch.special.erfc(a * math.sqrt(0.5)) / 2}.get(then, torch.sigmoid(-exponent(a, then)))
    tail = a * whole
    exact = z.clamp(min=0) - tail
    allowed = exact.abs() * 2.0**-23 + tail * (16 + 2 * exponent(a, then)) * 2.0**-24 + 1e-12 * (a > 5)
    assert ((y - exact).abs() <= allowed + 1e-37).all(), float(((y - exact).abs() / (allowed + 1e-37)).max())


@pytest.mark.parametrize("then", FOLLOWING)
def test_the_ends(isa: str, then: str) -> None:
    z = torch.zeros(4, 32)
    z[:3, 0] = torch.tensor([math.nan, 3e38, -3e38])
    y = OPS["linear_then"].overload(z, *identity(32), None, then, None)
    assert y[0].isnan().all()
    assert y[1, 0] == torch.tensor(3e38)
    assert -1e-12 < y[2, 0] <= 0
    assert not y[3].any()


@pytest.mark.parametrize("factor", [False, True], ids=["alone", "times"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("scheme", ["int4-g32", "int8", "nvfp4-wo", "int8-dyn", "fp8", "fp8-block"])
def test_every_way_of_a_product(isa: str, scheme: str, dtype: torch.dtype, factor: bool) -> None:
    """Like the product alone, in float64, followed by the function: the product's budget, less what the slope of f
    (below 1.13: 1 dB) and the loss of the negative half (f^2 has 0.4 of the power of z^2: 4 dB) can cost. A factor
    makes the results unequal, so that fewer count: 3 dB more."""
    op = OPS["dyn_linear_then" if preset(scheme).act else "linear_then"]
    for m in (1, 3, 33):
        for sample, then in zip(products(scheme, dtype, "cpu_tiles", n=50, k=256, m=m), FOLLOWING, strict=False):
            times = torch.randn(m, 50).to(dtype) if factor else None
            y = takes(lambda sample=sample, then=then, times=times: op.overload(*sample.args, then, times))
            exact = follow(sample.expected(), then, None if times is None else times.double())
            noise = (y.double() - exact).square().sum()
            assert 10 * (exact.square().sum() / noise).log10() > sample.budget - 5 - 3 * factor, (m, then)
