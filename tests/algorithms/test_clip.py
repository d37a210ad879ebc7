"""The clipping search against an exhaustive search over its ranges in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bitport.algorithms import Clip
from bitport.algorithms.clip_core import NARROWER, search
from bitport.numerics import Params, choose_qparams, dequantize_codes, quantize, quantize_codes, to_blocks
from bitport.schemes import preset

from .weights import DTYPES, SCHEMES, value, weight


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_block_gets_worse(scheme: str, dtype: torch.dtype) -> None:
    w, fmt = weight(dtype=dtype), preset(scheme).weight
    errors = [
        to_blocks((w.double() - value(parts, scheme, *w.shape)).abs() ** 3, fmt.block).sum((-3, -1))
        for parts in (Clip().solve(w, fmt), quantize(w, fmt))
    ]
    assert bool((errors[0] <= errors[1] * (1 + 2.0**-18)).all())  # pairwise sums of at most 2^14 float32 cubes
    if scheme.startswith(("int2", "int3", "int4")):
        assert float(errors[0].sum()) < 0.98 * float(errors[1].sum())


@pytest.mark.parametrize("size", [1.0, 1e-15, 1e15], ids="times {:g}".format)
@pytest.mark.parametrize("known", [True, False], ids=["inputs known", "unknown"])
def test_the_best_of_all_ranges_is_taken(known: bool, size: float) -> None:
    w, fmt = weight() * size, preset("int3-g32-sym").weight
    importance = torch.rand(w.shape[1]) + 0.1 if known else None

    def losses(params: Params) -> Tensor:
        scale, zero, _ = params
        q = dequantize_codes(quantize_codes(w, fmt, scale, zero), fmt, scale, zero).double()
        error = (w.double() - q).abs()
        loss = error**3 if importance is None else error**2 * importance.double()
        return to_blocks(loss, fmt.block).sum((-3, -1))

    least = torch.stack([losses(choose_qparams(w * factor, fmt)) for factor in (1.0, *NARROWER)]).amin(0)
    torch.testing.assert_close(losses(search(w, fmt, importance)), least, rtol=1e-5, atol=0)


def test_what_matters_is_weighed() -> None:
    """An outlier in a column of no importance is clipped; one in a column that dominates is kept."""
    w, fmt = torch.linspace(-1, 1, 32).repeat(4, 1), preset("int3-channel-sym").weight
    w[:, 7] = 3.0
    for at, count in ((7, 0.0), (7, 1e4)):
        importance = torch.ones(32)
        importance[at] = count
        scale = search(w, fmt, importance).scale
        assert bool((scale * 3 < 2.0 if count == 0 else scale * 3 > 2.9).all())


def test_matrices_of_a_batch_are_treated_alone() -> None:
    w, fmt = torch.stack([weight(), 3 * weight()]), preset("int4").weight
    both = Clip().solve(w, fmt)
    for at in range(2):
        assert torch.equal(both.data[at], Clip().solve(w[at], fmt).data)
