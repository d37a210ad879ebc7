"""SignRound: never worse than its start or rounding to nearest, with the gradients of its formula."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from bitport.algorithms import GPTQ, RTN, Algorithm, Clip, SignRound
from bitport.algorithms.signround_core import Ends, solve, summed_by_scale
from bitport.algorithms.spacing import snapped, within
from bitport.algorithms.sweeps_core import sweep
from bitport.calibrate.inputs import Inputs
from bitport.numerics import (
    NUMBER_TYPES,
    Format,
    Params,
    choose_qparams,
    dequantize_codes,
    from_blocks,
    quantize,
    quantize_codes,
    spread,
    to_blocks,
)
from bitport.schemes import preset

from .weights import DTYPES, SCHEMES, inputs, output_error, seen, value, weight

SLACK = 1 + 2.0**-12
"""Tolerance for x^T x of 400 rows in float32."""


def learned(steps: int, sweeps: int = 0, start: Algorithm = RTN()) -> SignRound:  # noqa: B008 (frozen)
    return SignRound(steps, sweeps, 0.0, start, shrinkage=0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_never_further_than_its_start_or_plain_rounding(scheme: str, dtype: torch.dtype) -> None:
    """For each group of rows that share scales; clearly better than rounding to nearest in total."""
    w, x, fmt = weight(dtype=dtype), inputs(), preset(scheme).weight
    start = Clip()
    ours, before, plain = (
        summed_by_scale(output_error(w, value(parts, scheme, *w.shape), x), fmt)
        for parts in (learned(50, start=start).solve(w, fmt, seen(x)), start.solve(w, fmt, seen(x)), quantize(w, fmt))
    )
    assert bool((ours <= before * SLACK).all())
    assert bool((ours <= plain * SLACK).all())
    if fmt.number.bits <= 4:
        assert float(ours.sum()) < 0.9 * float(plain.sum())


@pytest.mark.parametrize("scheme", ["int2", "int3-g32", "int4", "int4-sym", "nvfp4", "mxfp4", "nf4"])
def test_gptq_is_bettered(scheme: str) -> None:
    w, x, fmt = weight(), inputs(), preset(scheme).weight
    ours, gptq, plain = (
        float(output_error(w, value(each.solve(w, fmt, seen(x)), scheme, *w.shape), x).sum())
        for each in (SignRound(start=GPTQ(shrinkage=0.0), shrinkage=0.0), GPTQ(shrinkage=0.0), RTN())
    )
    assert ours < 0.97 * gptq
    assert ours < 0.6 * plain


def test_more_steps_find_better() -> None:
    w, x, fmt = weight(), inputs(), preset("int3-g32").weight
    errors = [
        float(output_error(w, value(learned(steps).solve(w, fmt, seen(x)), "int3-g32", *w.shape), x).sum())
        for steps in (0, 5, 50, 200)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.9 * errors[1]


@pytest.mark.parametrize("scheme", ["int3-g32", "int3-g32-sym", "int3-g32-fzero", "int4-tensor", "nvfp4", "nf4"])
def test_ranges_are_learned(scheme: str) -> None:
    """For columns that have nothing in common the nearest number is the best one, so that only other ranges help."""
    w, fmt = weight(), preset(scheme).weight
    start = Params(*choose_qparams(w, fmt))
    nearest = quantize_codes(w, fmt, *start)
    codes, params = solve(w, torch.eye(w.shape[1]), fmt, nearest, start, 200, 0)
    assert [None if part is None else part.dtype for part in params] == [
        None if part is None else part.dtype for part in start
    ]
    if start.zero is not None and params.zero is not None:
        moved = params.zero[params.zero != start.zero]
        assert torch.equal(moved, moved.round()) == (fmt.zero == "int")
    ours, plain = (w - dequantize_codes(each, fmt, *by) for each, by in ((codes, params), (nearest, start)))
    assert float(ours.square().sum()) < 0.99 * float(plain.square().sum())


@pytest.mark.parametrize("steps", [0, 1])
def test_it_begins_with_the_given_codes(steps: int) -> None:
    """Not with the nearest ones of the given ranges. The first step only looks at them, so each row is as given, or
    rounded to nearest where that is better."""
    w, x, fmt = weight(), inputs(), preset("int3-g32").weight
    start, nearest = choose_qparams(w * 0.8, fmt), choose_qparams(w, fmt)
    codes = quantize_codes(w, fmt, *start)
    codes[::2] ^= torch.randint(0, 2, w[::2].shape, dtype=torch.uint8)
    found, params = solve(w, seen(x).gram, fmt, codes, start, steps, 0)
    given = dequantize_codes(codes, fmt, *start)
    plain = dequantize_codes(quantize_codes(w, fmt, *nearest), fmt, *nearest)
    better = output_error(w, plain.double(), x) < output_error(w, given.double(), x)
    assert 0 < int(better.sum()) < len(w)
    torch.testing.assert_close(dequantize_codes(found, fmt, *params), torch.where(better[:, None], plain, given))


@pytest.mark.parametrize("block", [1, 7, 1000])
@pytest.mark.parametrize("scheme", ["int3-g32", "nvfp4", "int4-tensor"])
def test_after_enough_sweeps_no_single_code_can_be_bettered(scheme: str, block: int) -> None:
    """Tries all codes next to the result, one by one in float64."""
    w, x, fmt = weight(4, 30), inputs(30), preset(scheme).weight
    params, hessian = choose_qparams(w, fmt), seen(x).gram
    codes = sweep(w, hessian, fmt, quantize_codes(w, fmt, *params), params, 100, block)
    least = output_error(w, dequantize_codes(codes, fmt, *params).double(), x)
    for column in range(30):
        for other in range(fmt.number.qmax + 1):
            tried = codes.clone()
            tried[:, column] = other
            errors = output_error(w, dequantize_codes(tried, fmt, *params).double(), x)
            assert bool((errors >= least * (1 - 2.0**-12)).all())


def test_a_column_that_is_never_used_keeps_its_codes() -> None:
    w, fmt, used = weight(), preset("int4-g32").weight, torch.arange(150) % 3 > 0
    params = choose_qparams(w, fmt)
    codes = torch.randint(0, 16, w.shape, dtype=torch.uint8)
    found = sweep(w, seen(inputs() * used).gram, fmt, codes, params, 3)
    assert torch.equal(found[:, ~used], codes[:, ~used])
    assert not torch.equal(found[:, used], codes[:, used])


def test_two_weights_are_solved_as_by_trying_all() -> None:
    """With a fixed scale (powers of two) and two columns, each row has four choices of neighbours."""
    fmt = Format(dtype="int4", block=(1, 0), scale="e8m0")
    w = torch.rand(64, 2) * 10 - 5
    w[:, 0] = torch.where(w[:, 0].abs() < 4, 4.6, w[:, 0])  # one scale for all rows, so that a step is one
    hessian = torch.tensor([[1.0, 0.9], [0.9, 1.0]])
    start = choose_qparams(w, fmt)
    codes, params = solve(w, hessian, fmt, quantize_codes(w, fmt, *start), start, 400, 0)
    low = w.floor()
    tried = torch.stack([low + torch.tensor([a, b]) for a in (0.0, 1.0) for b in (0.0, 1.0)])
    least = (((w - tried) @ hessian) * (w - tried)).sum(-1).amin(0)
    error = w - dequantize_codes(codes, fmt, *params)
    found = ((error @ hessian) * error).sum(-1)
    assert float((found <= least * (1 + 1e-5)).float().mean()) > 0.9


SMOOTH = [
    pytest.param("int4-g16", id="zero point"),
    pytest.param("int4-g16-sym", id="symmetric"),
    pytest.param("nf4", id="codebook"),
    pytest.param("fp8-row", id="float"),
]


@pytest.mark.parametrize("scheme", SMOOTH)
def test_gradients(scheme: str) -> None:
    """Against autograd through the formula of the module, with rounding as the identity, for ends that have moved."""
    fmt = dataclasses.replace(preset(scheme).weight, scale="float32")
    w = torch.randn(32, 64) * 0.1
    start = choose_qparams(w * 0.6, fmt)  # so that some are clamped
    target, towards = to_blocks(w, fmt.block), to_blocks(torch.randn(32, 64), fmt.block)
    ends = Ends(fmt, start)
    ends.high_factor.mul_(0.9)
    ends.low_factor.mul_(0.7)
    before, params = (ends.high_factor.clone(), ends.low_factor.clone()), ends.params()
    scale = spread(params.scale)
    found, inside = snapped(target / scale, torch.zeros_like(target), fmt, params)
    ends.move(1.0, towards, found, target / scale, inside)
    signs = {"high": before[0] - ends.high_factor, "low": before[1] - ends.low_factor}
    for name, gradient in _exact_gradients(w, fmt, start, before, params.zero, towards, found, inside).items():
        clear = gradient.abs() > 1e-4 * gradient.abs().max()
        assert torch.equal(signs[name][clear], gradient.sign()[clear])


def _exact_gradients(
    w: Tensor,
    fmt: Format,
    start: Params,
    factors: tuple[Tensor, ...],
    rounded: Tensor | None,
    towards: Tensor,
    found: Tensor,
    inside: Tensor,
) -> dict[str, Tensor]:
    high, low = (factor.clone().requires_grad_() for factor in factors)
    units = to_blocks(w, fmt.block)
    if start.zero is None or rounded is None:
        scale = start.scale * high
        u = units / spread(scale)
        q = spread(scale) * torch.where(inside, u + (found - u).detach(), found)
        (q * towards).sum().backward()
        return {"high": high.grad}  # type: ignore[dict-item]
    zero = start.zero.float()
    bottom, top = -zero * start.scale * low, (fmt.number.qmax - zero) * start.scale * high
    scale = (top - bottom) / fmt.number.qmax
    offset = -bottom / scale
    offset = offset + (rounded - offset).detach()
    u = units / spread(scale)
    code = found + spread(rounded)
    q = spread(scale) * torch.where(inside, u + (found - u).detach(), code - spread(offset))
    (q * towards).sum().backward()
    return {"high": high.grad, "low": low.grad}  # type: ignore[dict-item]


@pytest.mark.parametrize("number", [name for name, each in NUMBER_TYPES.items() if each.signed or each.kind != "float"])
def test_what_is_moved_towards_a_number_rounds_to_it(number: str) -> None:
    fmt = Format(dtype=number, block=(1, 0))
    w = torch.randn(8, 40)
    params = choose_qparams(w, fmt)
    codes = torch.randint(0, fmt.number.qmax + 1, w.shape, dtype=torch.uint8)
    q = dequantize_codes(codes, fmt, *params)
    codes, q = (torch.where(q.isfinite(), each, other) for each, other in ((codes, codes[:, :1]), (q, q[:, :1])))
    q = torch.where(q.isfinite(), q, 0.0)
    target = within(to_blocks(w, fmt.block), to_blocks(q, fmt.block), fmt, params)
    again = dequantize_codes(quantize_codes(from_blocks(target, 8, 40), fmt, *params), fmt, *params)
    assert torch.equal(again, q)
    shift = (torch.rand(8, 40) - 0.5) * 0.02
    found, _ = snapped(target / spread(params.scale), to_blocks(shift, fmt.block), fmt, params)
    torch.testing.assert_close(from_blocks(found * spread(params.scale), 8, 40), q)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 2), (1, 33), (5, 129)])
@pytest.mark.parametrize("scheme", ["int3-g32", "nvfp4", "fp8-block", "int4-fzero"])
def test_odd_shapes(scheme: str, n: int, k: int) -> None:
    w, x, fmt = weight(n, k), inputs(k, 2 * k + 1), preset(scheme).weight
    ours, plain = (
        summed_by_scale(output_error(w, value(parts, scheme, n, k), x), fmt)
        for parts in (SignRound(20, damping=0.0).solve(w, fmt, seen(x)), quantize(w, fmt))
    )
    assert bool((ours <= plain * SLACK + 1e-12).all())


def test_experts_are_solved_each_with_its_own_inputs() -> None:
    w, fmt = torch.stack([weight(8, 64), weight(8, 64)]), preset("int4-g32").weight
    x, both = inputs(64), Inputs((2,), 64)
    both.add(x, (1,))
    parts = SignRound(20).solve(w, fmt, both)
    assert torch.equal(parts.data[1], SignRound(20).solve(w[1], fmt, seen(x)).data)
    assert torch.equal(parts.data[0], quantize(w[0], fmt).data)


def test_what_its_start_refuses_it_refuses() -> None:
    from bitport.algorithms import HQQ

    assert "powers of two" in str(SignRound(start=HQQ()).refuses(preset("mxfp4").weight, "linear"))
    assert "is for the weights of products" in str(SignRound().refuses(preset("int4").weight, "conv"))
