"""Ranges of inputs from a histogram, compared with those from all of the inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bitport.calibrate.magnitudes import PARTS, Magnitudes
from bitport.numerics import static_scale


def scale_of(batches: list[Tensor], act: str = "int8-tensor") -> float:
    seen = Magnitudes()
    for batch in batches:
        seen.add(batch)
    return float(seen.scale(act))


def squared_error(x: Tensor, scale: float) -> float:
    x = x.double()
    return float(((x / scale).round().clamp(-128, 127) * scale - x).square().sum())


def drawn(kind: str, generator: torch.Generator) -> Tensor:
    uniform = torch.rand(64, 1000, generator=generator) - 0.5
    if kind == "uniform":
        return uniform
    if kind == "normal":
        return torch.randn(64, 1000, generator=generator)
    if kind == "laplace":
        return -uniform.sign() * (1 - 2 * uniform.abs()).clamp(min=1e-7).log()
    x = torch.randn(64, 1000, generator=generator)
    x[0, 0] = 3000  # "massive": one value so large that all others round to 0
    return x


@pytest.mark.parametrize("kind", ["uniform", "normal", "laplace", "massive"])
def test_the_range_has_the_least_error(kind: str) -> None:
    """Values are represented by the middle of their bin, which adds (bin / step)^2 < 0.03 of the error of a step at the
    ranges found here."""
    x = drawn(kind, torch.Generator().manual_seed(1))
    errors = [squared_error(x, float(x.abs().max() * part) / 127) for part in PARTS]
    found = squared_error(x, scale_of(list(x.split(10))))
    assert found <= 1.03 * min(errors)
    if kind == "laplace":
        assert found < 0.9 * errors[0]
    if kind in ("uniform", "massive"):
        assert scale_of([x]) == pytest.approx(float(x.abs().max()) / 127, rel=1e-6)


def test_the_order_makes_no_difference() -> None:
    batches = [torch.randn(50, 20, generator=torch.Generator().manual_seed(at)) * 3**at for at in range(6)]
    assert scale_of(batches) == scale_of(batches[::-1]) == scale_of([torch.cat(batches)])


@pytest.mark.parametrize("act", ["int8-tensor", "fp8-tensor"])
@pytest.mark.parametrize("order", [1, -1], ids=["larger later", "larger first"])
def test_what_several_saw_adds_up(act: str, order: int) -> None:
    """Different bin widths, one that saw only zeros, one that saw nothing. None of the parts is modified."""
    drawn = [torch.randn(50, 20, generator=torch.Generator().manual_seed(at)) * 5**at for at in range(4)][::order]
    parts = [Magnitudes() for _ in range(6)]
    for part, batch in zip(parts, [*drawn, torch.zeros(3, 20)], strict=False):
        part.add(batch)
    before, total = [float(part.scale(act)) for part in parts[:5]], Magnitudes()
    for part in parts:
        total += part
    assert float(total.scale(act)) == scale_of([torch.cat(drawn)], act)
    assert int(total.counts.sum()) == 4 * 50 * 20
    assert [float(part.scale(act)) for part in parts[:5]] == before


def test_what_is_no_number_is_not_lost_when_it_adds_up() -> None:
    total, bad = Magnitudes(), Magnitudes()
    total.add(torch.ones(3))
    bad.add(torch.tensor([1.0, float("nan")]))
    total += bad
    assert total.peak is not None
    assert total.peak.isnan()


@pytest.mark.parametrize("act", ["fp8-tensor", "nvfp4"])
def test_floats_take_in_everything(act: str) -> None:
    x = drawn("laplace", torch.Generator().manual_seed(2))
    assert scale_of([x], act) == float(static_scale(x.abs().max(), act))


@pytest.mark.parametrize("value", [1e-45, 1e-30, 3e38])
def test_the_smallest_and_the_largest(value: float) -> None:
    assert scale_of([torch.full((3,), value)]) == float(static_scale(torch.tensor(value), "int8-tensor"))
