"""GPTQ: against a float64 copy that processes one column at a time, and against properties of any optimum."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from bitport.algorithms import GPTQ, SignRound, pieces
from bitport.algorithms.block_params import rounded, stored
from bitport.algorithms.clip_core import search
from bitport.algorithms.gptq import hessian_of
from bitport.algorithms.gptq_core import MULTIPLIED, SOLVED, inverse_factor, objective, solve
from bitport.calibrate.inputs import Inputs
from bitport.errors import ArgumentError
from bitport.numerics import (
    Format,
    Params,
    choose_qparams,
    dequantize,
    quantize,
    quantize_codes,
    quantize_dequantize,
)
from bitport.schemes import preset

from .weights import DTYPES, SCHEMES, inputs, output_error, seen, value, weight


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", [*SCHEMES, "fp8-b8x32", "nf4-b8x32", "int4-b8x32-fzero"])
def test_outputs_are_nearer_than_those_of_plain_rounding(scheme: str, dtype: torch.dtype) -> None:
    """No row is worse, since rows that would be are rounded to nearest; all rows together are much better."""
    w, x, fmt = weight(dtype=dtype), inputs(), preset(scheme).weight
    ours, plain = (
        output_error(w, value(parts, scheme, *w.shape), x)
        for parts in (GPTQ(clip=False, shrinkage=0.0).solve(w, fmt, seen(x)), quantize(w, fmt))
    )
    assert bool((ours <= plain * (1 + 2.0**-12)).all())  # x^T x in float32, 400 rows
    assert float(ours.sum()) < 0.8 * float(plain.sum())


@pytest.mark.parametrize("scheme", ["int3-g32", "nf4", "nvfp4", "int4-b8x16-sym"])
def test_small_layers_are_not_further_than_by_plain_rounding(scheme: str) -> None:
    """In some of these, ranges that are better for each column on its own are worse together."""
    fmt = preset(scheme).weight
    for at in range(35):
        n, k = (1, 2, 9)[at % 3], (8, 33)[at % 2]
        w, found = torch.randn(n, k) * 0.05, seen((torch.randn(20, k) + at % 5).relu())
        hessian = hessian_of(found, GPTQ().shrinkage, w.device).double()
        ours, plain = (
            objective(w.double() - value(parts, scheme, n, k), hessian).sum()
            for parts in (GPTQ().solve(w, fmt, found), quantize(w, fmt))
        )
        assert ours <= plain * (1 + 2.0**-12)


@pytest.mark.parametrize("scheme", ["int2", "int3-g32", "int4-channel", "nf4"])
def test_large_inputs_are_kept_precise(scheme: str) -> None:
    """Ranges are searched for them first of all, and their columns are rounded first."""
    w, x, fmt = weight(), inputs(), preset(scheme).weight
    x[:, ::29] *= 30
    found, blind = seen(x), Params(*search(w, fmt))
    ours, *others = (
        float(output_error(w, value(parts, scheme, *w.shape), x).sum())
        for parts in (
            GPTQ(shrinkage=0.0).solve(w, fmt, found),
            GPTQ(shrinkage=0.0, clip=False).solve(w, fmt, found),
            GPTQ(shrinkage=0.0, sort=False).solve(w, fmt, found),
            stored(solve(w, found.gram, fmt, blind), fmt, blind),
        )
    )
    assert ours < min(others)


@pytest.mark.parametrize("clip", [False, True], ids=["widest range", "searched range"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_inputs_that_are_not_correlated_give_plain_rounding(scheme: str, clip: bool) -> None:
    """With a diagonal Hessian the output error is a sum over columns, and rounding to nearest is best for each."""
    w, fmt = weight(), preset(scheme).weight
    x = torch.diag(torch.rand(w.shape[1]) + 0.1)
    parts = GPTQ(clip=clip).solve(w, fmt, seen(x))
    assert torch.equal(parts.data, quantize(w, fmt, scale=parts.scale, zero=parts.zero, scale2=parts.scale2).data)


@pytest.mark.parametrize("by", [GPTQ, functools.partial(SignRound, 20)], ids=["gptq", "signround"])
@pytest.mark.parametrize("scheme", ["int2-g32", "int3-g32", "mxfp4"])
def test_what_channels_have_in_common_counts_less(by: Any, scheme: str) -> None:
    w, x, fmt = weight(), inputs(), preset(scheme).weight
    found, less = seen(x), seen(x)
    less.gram.diagonal().mul_(5)
    before = found.gram.clone()
    ours, raw, apart = (
        by(shrinkage=share).solve(w, fmt, given) for share, given in ((4.0, found), (0.0, found), (0.0, less))
    )
    if by is GPTQ:  # the other has a starting point of its own
        assert torch.equal(ours.data, apart.data)
    assert not torch.equal(ours.data, raw.data)
    assert torch.equal(found.gram, before)


@pytest.mark.parametrize("damping", [1.0, 3.0])
def test_damping_may_be_as_large_as_the_mean_or_larger(damping: float) -> None:
    upper = inverse_factor(2 * torch.eye(8), damping)
    torch.testing.assert_close(upper, torch.eye(8) * (2 + 2 * damping) ** -0.5)


@pytest.mark.parametrize("block", [1, 7, 150, 1000])
@pytest.mark.parametrize("sort", [False, True], ids=["as they lie", "sorted"])
def test_codes_are_those_of_one_column_at_a_time(block: int, sort: bool) -> None:
    """In float64, inverting the remaining Hessian for each column. A code may differ where the float32 sums fall on the
    other side of a rounding boundary; then the error is equally good."""
    w, x, fmt = weight(), inputs(), preset("int4-channel").weight
    params = choose_qparams(w, fmt)
    hessian = seen(x).gram
    codes = solve(w, hessian, fmt, params, 0.01, block, sort)
    exact = _one_by_one(w, hessian, params, sort)
    assert float((codes != exact).float().mean()) < 0.01


def _one_by_one(w: Tensor, hessian: Tensor, params: Params, sort: bool) -> Tensor:
    fmt, k = preset("int4-channel").weight, w.shape[1]
    damped = hessian.double() + 0.01 * hessian.double().diagonal().mean() * torch.eye(k)
    left, remaining = w.double().clone(), list(range(k))
    order = hessian.diagonal().argsort(descending=True).tolist() if sort else list(range(k))
    codes = torch.empty(w.shape, dtype=torch.uint8)
    scale, zero = params.scale.double(), params.zero.double()  # type: ignore[union-attr]
    for column in order:
        inverse = torch.linalg.inv(damped[remaining][:, remaining])
        here = remaining.index(column)
        codes[:, column] = (torch.round(left[:, column] / scale[:, 0]) + zero[:, 0]).clamp(0, fmt.number.qmax)
        error = left[:, column] - (codes[:, column] - zero[:, 0]) * scale[:, 0]
        left[:, remaining] -= error[:, None] / inverse[here, here] * inverse[here]
        remaining.remove(column)
    return codes


@pytest.mark.parametrize("k", [40, 2 * SOLVED + 3])
def test_the_factor_is_that_of_the_inverse(k: int) -> None:
    hessian = seen(inputs(k)).gram
    upper = inverse_factor(hessian, 0.01).double()
    damped = hessian.double() + 0.01 * hessian.double().diagonal().mean() * torch.eye(k)
    assert torch.equal(upper, upper.triu())
    torch.testing.assert_close(upper.t() @ upper @ damped, torch.eye(k, dtype=torch.float64), rtol=0, atol=1e-4)


@pytest.mark.parametrize("shape", [(5, 40), (2, 3, 2 * MULTIPLIED + 3)])
def test_the_objective_is_the_error_of_the_outputs(shape: tuple[int, ...]) -> None:
    """Each of the sums over k products, twice, is off by at most k roundings of the sum of their magnitudes."""
    *batch, _, k = shape
    difference, hessian = torch.randn(shape), seen(inputs(k)).gram.expand(*batch, k, k)
    exact = (difference.double() @ hessian.double() * difference.double()).sum(-1)
    most = (difference.double().abs() @ hessian.double().abs() * difference.double().abs()).sum(-1)
    assert bool(((objective(difference, hessian) - exact).abs() <= 2 * k * 2.0**-24 * most).all())


@pytest.mark.parametrize("scheme", ["int4-b16x32", "int4-tensor", "nvfp4", "nf4"])
def test_pieces_are_those_of_the_whole(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w, x, fmt = weight(50), inputs(), preset(scheme).weight
    both = torch.stack([w, 3 * w])
    whole, plain = GPTQ().solve(w, fmt, seen(x)), rounded(both, fmt, choose_qparams(both, fmt))
    monkeypatch.setattr(pieces, "PIECE", 5 * w.shape[1])
    for ours, theirs in zip(GPTQ().solve(w, fmt, seen(x)), whole, strict=True):
        assert ours is theirs or torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    assert torch.equal(rounded(both, fmt, choose_qparams(both, fmt)), plain)
    assert torch.equal(plain, torch.stack([quantize_dequantize(each, fmt) for each in both]))


SINGULAR = {
    "fewer inputs than columns": lambda: inputs(150, 5),
    "one input": lambda: inputs(150, 1),
    "columns that are never used": lambda: inputs() * (torch.arange(150) % 3 > 0),
    "two columns alike": lambda: inputs()[:, torch.arange(150) // 2],
    "nothing but zeros": lambda: torch.zeros(10, 150),
    "huge": lambda: inputs() * 1e10,
    "tiny": lambda: inputs() * 1e-12,
}


@pytest.mark.parametrize("damping", [0.0, 0.01])
@pytest.mark.parametrize("what", SINGULAR)
def test_singular_hessians(what: str, damping: float) -> None:
    w, x, fmt = weight(), SINGULAR[what](), preset("int4-g32").weight
    parts = GPTQ(damping=damping, clip=False).solve(w, fmt, seen(x))
    ours, plain = (output_error(w, value(each, "int4-g32", *w.shape), x) for each in (parts, quantize(w, fmt)))
    assert bool((ours <= plain * (1 + 2.0**-10)).all())


def test_columns_that_are_never_used_are_rounded_plainly() -> None:
    w, fmt = weight(), preset("int4-g32").weight
    dead = torch.arange(150) % 3 == 0
    params = choose_qparams(w, fmt)
    codes = solve(w, seen(inputs() * ~dead).gram, fmt, params)
    assert torch.equal(codes[:, dead], quantize_codes(w, fmt, *params)[:, dead])


@pytest.mark.parametrize("dtype", ["int1", "ggml_iq3s", "int4", "float4_e2m1"])
def test_a_block_of_zeros_stays_one_and_spoils_no_other(dtype: str) -> None:
    """Types without a code for zero give it a scale of zero, by which nothing can be divided."""
    w, x, fmt = weight(), inputs(), Format(dtype=dtype, block=(1, 50))
    w[:, :50] = 0
    ours = dequantize(GPTQ(clip=False, shrinkage=0.0).solve(w, fmt, seen(x)), fmt, *w.shape)
    plain = dequantize(quantize(w, fmt), fmt, *w.shape)
    assert not bool(ours[:, :50].any())
    assert float(output_error(w, ours.double(), x).sum()) < float(output_error(w, plain.double(), x).sum())


def test_a_hessian_that_cannot_be_mended() -> None:
    with pytest.raises(ArgumentError, match="no positive Hessian"):
        inverse_factor(-torch.eye(3), 0.01)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 2), (1, 33), (5, 129)])
@pytest.mark.parametrize("scheme", ["int3-g32", "nvfp4", "fp8-block"])
def test_odd_shapes(scheme: str, n: int, k: int) -> None:
    w, x, fmt = weight(n, k), inputs(k, 2 * k + 1), preset(scheme).weight
    ours, plain = (
        output_error(w, value(parts, scheme, n, k), x)
        for parts in (GPTQ(clip=False, shrinkage=0.0).solve(w, fmt, seen(x)), quantize(w, fmt))
    )
    assert bool((ours <= plain * (1 + 2.0**-12) + 1e-12).all())


def test_experts_are_solved_each_with_its_own_inputs() -> None:
    w, fmt = torch.stack([weight(8, 64), weight(8, 64), weight(8, 64)]), preset("int4-g32").weight
    x = [inputs(64), inputs(64)]
    both = Inputs((3,), 64)
    both.add(x[0], (0,))
    both.add(x[1], (2,))
    parts = GPTQ().solve(w, fmt, both)
    for at, alone in ((0, seen(x[0])), (2, seen(x[1]))):
        assert torch.equal(parts.data[at], GPTQ().solve(w[at], fmt, alone).data)
    assert torch.equal(parts.data[1], quantize(w[1], fmt).data)
