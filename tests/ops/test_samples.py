"""Every op, on every one of its samples, against the float64 judge, within the budget derived for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bitport.numerics import sqnr
from bitport.ops import OPS, Op, Sample

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES = [
    pytest.param(op, dtype, id=f"{op.name}-{str(dtype)[6:]}")
    for op in OPS.values()
    for dtype in DTYPES
    if next(iter(op.samples(CPU, dtype)), None) is not None
]
BATCHES = {"vector": 1, "row": 2, "rows": 2, "batch": 3, "empty": 2, "strided": 2, "every-other": 2}


def first(result: Any) -> Tensor:
    return result[0] if isinstance(result, list) else result


def shortfall(sample: Sample, result: Tensor) -> float:
    """dB by which the result misses its budget; bytes (an infinite budget) must be equal."""
    expected = sample.expected()
    if sample.budget == float("inf"):
        assert torch.equal(result.contiguous().view(torch.uint8).double().reshape(expected.shape), expected)
        return 0.0
    assert result.shape == expected.shape
    return sample.budget - float(sqnr(expected, result)) if result.numel() else 0.0


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_within_budget(op: Op, dtype: torch.dtype) -> None:
    missed = {}
    for sample in op.samples(CPU, dtype):
        if (gap := shortfall(sample, first(op.overload(*sample.args)))) > 0:
            missed[sample.name] = gap
    assert missed == {}


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_the_generic_overload_is_the_generic_kernel(op: Op, dtype: torch.dtype) -> None:
    generic = getattr(torch.ops.bitport, op.name).generic
    for sample in op.samples(CPU, dtype):
        results = (generic(*sample.args), op.generic(*sample.args))
        for got, wanted in zip(*(r if isinstance(r, list) else [r] for r in results), strict=True):
            assert torch.equal(
                got.view(torch.uint8) if got.dim() else got, wanted.view(torch.uint8) if wanted.dim() else wanted
            )


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_the_fake_kernel_tells_the_truth(op: Op, dtype: torch.dtype) -> None:
    """Shape, dtype and contiguity on meta tensors are those of the result."""
    for sample in op.samples(CPU, dtype):
        real = op.overload(*sample.args)
        fake = op.overload(*(arg.to("meta") if isinstance(arg, Tensor) else arg for arg in sample.args))
        for got, wanted in zip(*(r if isinstance(r, list) else [r] for r in (fake, real)), strict=True):
            described = [(t.shape, t.dtype, t.is_contiguous()) for t in (got, wanted)]
            assert described[0] == described[1], sample.name
            assert got.device.type == "meta"


def test_the_samples_hold_every_kind_of_input() -> None:
    seen = {sample.name.rsplit("-", 1)[-1]: sample.args[0] for sample in OPS["linear"].samples(CPU, torch.float32)}
    every = dict(seen)
    assert every["other"].stride(-1) == 2  # "every-other"
    assert {name: every[name].dim() for name in ("vector", "row", "batch")} == {"vector": 1, "row": 2, "batch": 3}
    assert every["empty"].shape[0] == 0
    assert not every["strided"].is_contiguous()


def test_the_samples_hold_every_granularity_and_zero() -> None:
    weights = [sample.args[1:11] for sample in OPS["linear"].samples(CPU, torch.float32)]
    zeros = {None if zero is None else zero.is_floating_point() for _, _, zero, *_ in weights}
    assert zeros == {None, True, False}
    blocks = {(w[7] == w[5], w[7] == 1, w[8] == w[6]) for w in weights}
    assert {(True, False, True), (False, True, True), (False, True, False), (False, False, False)} <= blocks
    assert any(w[6] % w[8] for w in weights), "no sample has a short last group"


@pytest.mark.parametrize("op", ["linear", "dyn_linear"])
def test_a_budget_is_not_slack(op: str) -> None:
    """One column of the input doubled, or one weight code changed, is noticed."""
    for sample in OPS[op].samples(CPU, torch.float32):
        if not sample.name.endswith("-rows"):
            continue
        x, data, *rest = sample.args
        broken = data.clone().view(torch.uint8)
        broken[0, 0] ^= 0x22
        result = OPS[op].overload(x, broken.view(data.dtype), *rest)
        assert shortfall(sample, result) > 0, sample.name
