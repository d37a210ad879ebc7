"""Inputs rounded by Triton's kernels have the bits of the generic op. Run by test_triton.py, like on_triton.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from bitport.backends.aten import int_mm, scaled_mm
from bitport.backends.triton import kernels, rounding
from bitport.numerics import ACTIVATIONS, fake_quantize
from bitport.ops import OPS, Impl, register_kernel, unregister_kernel
from bitport.ops.convert import from_list
from tests.backends.products import products, shortfall
from tests.turns import turns

DEVICE = torch.device(os.environ["TRITON_DEVICE"])
BF16 = torch.bfloat16
FLOATS = {"bf16": BF16, "fp16": torch.float16, "fp32": torch.float32}
GENERIC = OPS["quantize_input"].generic

if DEVICE.type == "cpu":
    from tests.backends import interpreter

    interpreter.correct()


def values(dtype: torch.dtype, k: int) -> Tensor:
    """Rows: ordinary, all zero, tiny, huge, halfway between neighbours, with zeros of both signs, of one sign only,
    with a NaN, with an infinity, zeros but for a NaN."""
    x = torch.randn(10, k)
    x[1], x[2], x[3] = 0, x[2] * 1e-7, x[3] * 3e4
    x[4] = torch.arange(k) % 25 / 4 - 3
    x[5, ::2] = -0.0
    x[6] = x[6].abs() + 1
    x[9] = 0
    x = x.to(dtype)
    x[7, 3], x[8, k // 2], x[9, 1] = float("nan"), -float("inf"), float("nan")
    return x


def same(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        one, other = one.cpu(), other.cpu()
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.is_contiguous()
        if one.dtype == torch.float32:
            assert torch.equal(one.isnan(), other.isnan())
            one, other = one.nan_to_num(7.0), other.nan_to_num(7.0)
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize(("act", "dtype"), turns(ACTIVATIONS, FLOATS))
def test_codes_and_scales_are_the_same_bits(act: str, dtype: str) -> None:
    for k in (7, 200, 1040, 4100):
        x = values(FLOATS[dtype], k)
        for part in (x, x[:7]):  # with a NaN, one scale for all is NaN
            same(kernels.quantize_input(part.to(DEVICE), act, None), GENERIC(part, act, None))


@pytest.mark.parametrize("act", [name for name, fmt in ACTIVATIONS.items() if fmt.block == (0, 0) or fmt.global_scale])
def test_a_scale_that_is_given(act: str) -> None:
    x, scale = values(BF16, 200), torch.tensor([0.013])
    kept = scale.to(DEVICE)
    got = kernels.quantize_input(x.to(DEVICE), act, kept)
    same(got, GENERIC(x, act, scale))
    assert all(part.data_ptr() != kept.data_ptr() for part in got), "an op returns no views of what it took"


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_any_rank_and_strides(act: str) -> None:
    x = torch.randn(40, 6).to(BF16).t().reshape(2, 3, 40)
    one = torch.randn(96).to(BF16)
    for each in (x, x[:, 1:], one, one[::2]):
        same(kernels.quantize_input(each.to(DEVICE), act, None), GENERIC(each, act, None))


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_all_values_of_a_dtype(act: str) -> None:
    """Every bfloat16, in order and shuffled: each tie, each subnormal, each end. Per-tensor scales are given, as 1."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16)
    x = torch.where(x.isnan(), torch.nan, x)  # the sign of a NaN differs from device to device
    scale = torch.ones(1) if ACTIVATIONS[act].block == (0, 0) else None
    for each in (x, x[torch.randperm(x.numel())]):
        rows = each.reshape(16, -1)
        kept = None if scale is None else scale.to(DEVICE)
        same(kernels.quantize_input(rows.to(DEVICE), act, kept), GENERIC(rows, act, scale))


@pytest.mark.parametrize(("act", "dtype"), turns(ACTIVATIONS, FLOATS))
def test_inputs_of_products_are_rounded_alike(act: str, dtype: str) -> None:
    """To the same codes: only one rounding of a product of two scales may differ."""
    for k in (7, 200, 1040):
        x = values(FLOATS[dtype], k)
        if ACTIVATIONS[act].block == (0, 0):
            x = x[:7]
        got = rounding.rounded(x.to(DEVICE), act, None)
        value = got.rows.double()
        if got.scale is not None:
            scale = got.scale.double()
            value = value * (scale if got.place == "row" else scale.repeat_interleave(128, 1)[:, :k])
        if got.scale2 is not None:
            value = value * got.scale2.double()
        want = fake_quantize(x, act).double()
        value = value.cpu()
        assert torch.equal(value.isnan(), want.isnan())
        assert torch.allclose(value.nan_to_num(), want.nan_to_num(), rtol=2.0**-22, atol=0)


@pytest.fixture
def registered() -> Iterator[list[str]]:
    """Register Triton's kernel for quantize_input on this device; yields the list of its calls."""
    asked: list[str] = []

    def run(x: Tensor, act: str, act_scale: Tensor | None) -> list[Tensor]:
        asked.append(act)
        return kernels.quantize_input(x, act, act_scale)

    impl = Impl("quantize_input", "counted", DEVICE.type, run, kernels.refuses_quantize_input, priority=99)
    register_kernel(impl)
    yield asked
    unregister_kernel(impl)


@pytest.mark.parametrize(("scheme", "run"), [("int8-dyn", lambda *args: int_mm.run(17, *args)), ("fp8", scaled_mm.run)])
def test_pytorchs_products_use_it(scheme: str, run: Callable[..., Tensor], registered: list[str]) -> None:
    layout = "signed_int8" if scheme == "int8-dyn" else "plain"
    (sample,) = products(scheme, BF16, layout, n=32, k=64, m=3)
    args = [arg.to(DEVICE) if isinstance(arg, Tensor) else arg for arg in sample.args]
    assert shortfall(sample, run(*args).cpu()) <= 3
    assert registered == [args[11]]


def test_no_rows_are_refused() -> None:
    assert kernels.refuses_quantize_input(torch.empty(0, 8), "int8", None) == "x has no rows"
    assert from_list(GENERIC(torch.empty(0, 8), "int8", None)).data.shape == (0, 8)
