"""HQQ: its loss decreases for every block, and its steps match their definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bitport.algorithms import HQQ, pieces
from bitport.algorithms.hqq_core import SMALLEST, Sums, fit, toward
from bitport.numerics import Params, quantize, to_blocks
from bitport.schemes import preset

from .weights import DTYPES, SCHEMES, value, weight

FITTED = [name for name in SCHEMES if not name.startswith("mx")]


def losses(w: Tensor, scheme: str, steps: int, power: float = 0.7) -> Tensor:
    fmt = preset(scheme).weight
    parts = HQQ(steps=steps).solve(w, fmt) if steps else quantize(w, fmt)
    error = w.double() - value(parts, scheme, *w.shape)
    return to_blocks(error.abs() ** power, fmt.block).sum((-3, -1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", FITTED)
def test_the_loss_of_no_block_rises(scheme: str, dtype: torch.dtype) -> None:
    w = weight(dtype=dtype)
    before, few, many = (losses(w, scheme, steps) for steps in (0, 2, 20))
    slack = 1 + 2.0**-16  # the loss is a float32 sum of float32 powers
    assert bool((few <= before * slack).all())
    assert bool((many <= few * slack).all())


@pytest.mark.parametrize("scheme", FITTED)
def test_large_weights_are_not_cut_off(scheme: str) -> None:
    """The fourth powers of the errors: a fit to the loss alone lets those of some blocks grow a hundred times."""
    w = weight()
    w[:, ::37] *= 4
    before, after = (losses(w, scheme, steps, power=4) for steps in (0, 20))
    assert bool((after <= before * (1 + 2.0**-16)).all())


@pytest.mark.parametrize(
    "scheme", ["int2", "int3-g32", "int4", "int4-sym", "int4-fzero", "int4-channel", "nf4", "nvfp4"]
)
def test_the_loss_falls(scheme: str) -> None:
    w, share = weight(), 0.97 if scheme.startswith("int") else 0.99
    assert float(losses(w, scheme, 20).sum()) < share * float(losses(w, scheme, 0).sum())


def sums(target: Tensor, codes: Tensor, old: Params) -> Sums:
    """Sums for blocks that are rows; ``target`` is in units of the old scale."""
    values = codes.float() - (8 if old.zero is None else old.zero.float())
    pull = target - values
    ones = torch.full((len(codes), 1), float(codes.shape[-1]))
    return Sums(ones, *(each.sum(-1, keepdim=True) for each in (values, pull, values * pull, values.square())))


@pytest.mark.parametrize("zero", ["sym", "asym", "fzero"])
def test_codes_made_from_a_grid_give_the_grid_back(zero: str) -> None:
    """Least squares recovers the grid from its codes, whatever scale it starts from; with an integer zero point the
    nearest one, and the best scale for it."""
    fmt = preset(f"int4-channel-{zero}").weight
    codes = torch.randint(0, 16, (3, 64), dtype=torch.uint8)
    scale, offset = torch.tensor([[0.5], [0.9], [2.0]]), torch.tensor([[7.25], [3.75], [12.5625]])
    target = (codes.float() - (8 if zero == "sym" else offset)) * scale
    old = {"sym": None, "asym": torch.zeros(3, 1, dtype=torch.uint8), "fzero": torch.zeros(3, 1)}[zero]
    start = Params(torch.ones(3, 1), old, None)
    found = fit(sums(target, codes, start), fmt, start)
    if found.zero is not None:
        torch.testing.assert_close(found.zero.float(), offset.round() if zero == "asym" else offset)
    values = codes.double() - (8 if found.zero is None else found.zero.double())
    best = (target * values).sum(-1, keepdim=True) / values.square().sum(-1, keepdim=True)
    torch.testing.assert_close(found.scale, best.float(), rtol=1e-5, atol=0)


def test_a_block_with_nothing_to_fit_keeps_its_scale() -> None:
    fmt, codes = preset("int4-channel").weight, torch.full((1, 16), 8, dtype=torch.uint8)
    old = Params(torch.full((1, 1), 0.25), torch.full((1, 1), 8, dtype=torch.uint8), None)
    assert float(fit(sums(torch.zeros(1, 16), codes, old), fmt, old).scale) == 0.25


@pytest.mark.parametrize("scheme", ["int4", "int4-sym", "nvfp4", "fp8"])
def test_zeros_stay_zeros(scheme: str) -> None:
    parts = HQQ().solve(torch.zeros(4, 64), preset(scheme).weight)
    assert not value(parts, scheme, 4, 64).any()


def test_small_errors_are_followed_and_outliers_let_go() -> None:
    error = torch.linspace(-4, 4, 81)
    size = error.abs()
    pull = toward(error, size, size.clamp(min=SMALLEST) ** (0.7 - 1), 10.0)
    torch.testing.assert_close(pull, -pull.flip(0))
    vanishing = 10.0 ** (-1 / (2 - 0.7))  # where |e| = |e|^(p - 1) / beta
    assert torch.equal(pull == error, size <= vanishing)
    assert float(pull[-1]) < 0.1


def test_pieces_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are independent, so neither cutting a matrix into pieces nor batching it changes the result."""
    fmt, w = preset("int3-g32").weight, weight()
    whole = HQQ().solve(w, fmt)
    monkeypatch.setattr(pieces, "PIECE", 5 * w.shape[1])
    for found in (HQQ().solve(w, fmt), HQQ().solve(torch.stack([w, w]), fmt)):
        for ours, theirs in zip(found[:3], whole[:3], strict=True):
            assert torch.equal(ours, theirs.expand_as(ours))


def test_powers_of_two_are_refused() -> None:
    assert "powers of two" in str(HQQ().refuses(preset("mxfp4").weight, "linear"))
