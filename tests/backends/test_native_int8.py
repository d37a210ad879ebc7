"""Products with int8 inputs in the native kernels, in every variant that this processor can run, against float64."""

from __future__ import annotations

import threading
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bitport.backends import cpu
from bitport.backends.cpu.native import Library
from bitport.numerics import Format, Quantized, fake_quantize, quantize
from bitport.ops import OPS, Weight, samples
from bitport.ops.reference import value_of
from tests.turns import turns

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CPU = torch.device("cpu")
LIBRARY = cpu.LIBRARY
FLOATS = (BF16, FP16, FP32)
DTYPES = pytest.mark.parametrize("dtype", FLOATS, ids=["bf16", "fp16", "fp32"])
ACTS = ("int8", "int8-asym", "int8-tensor")
FORMATS = {
    **{
        f"int{bits}-{granularity}-{zero}": Format(dtype=f"int{bits}", block=block, zero=zero, scale="input")
        for bits in range(1, 9)
        for granularity, block in (("g32", (1, 32)), ("channel", (1, 0)))
        for zero in ("none", "int", "float")
    },
    "int4-g16": Format(dtype="int4", block=(1, 16), zero="int"),
    "int8-g48": Format(dtype="int8", block=(1, 48), zero="float"),
    "int5-g64": Format(dtype="int5", block=(1, 64), scale="float16"),
    "int4-g128": Format(dtype="int4", block=(1, 128), scale="bfloat16"),
    "int8-g128": Format(dtype="int8", block=(1, 128), zero="int", scale="bfloat16"),
    "int4-tensor": Format(dtype="int4", block=(0, 0)),
    "int4-b8x16": Format(dtype="int4", block=(8, 16)),
    "int4-e8m0": Format(dtype="int4", block=(1, 32), scale="e8m0"),
    "int4-e4m3": Format(dtype="int4", block=(1, 32), scale="e4m3", global_scale=True),
}


class Product(NamedTuple):
    weight: Weight
    value: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor, act: str, act_scale: Tensor | None = None) -> Tensor:
        assert isinstance(LIBRARY, Library)
        return LIBRARY.linear(x, self.weight, self.bias, act, act_scale)

    def expected(self, x: Tensor, act: str, act_scale: Tensor | None = None) -> Tensor:
        bias = None if self.bias is None else self.bias.double()
        return F.linear(fake_quantize(x, act, act_scale).double(), self.value, bias)

    def shortfall(self, x: Tensor, act: str, act_scale: Tensor | None = None) -> float:
        """dB by which the product misses its budget; negative where it is better."""
        got, expected = self(x, act, act_scale), self.expected(x, act, act_scale)
        assert got.shape == expected.shape
        assert got.dtype == x.dtype
        noise = (got.double() - expected).square().sum()
        budget = samples.product_budget(x.dtype, self.weight.k, expected.numel())
        return float(budget + 10 * (noise / expected.square().sum()).log10()) if noise else -float("inf")


def in_tiles(parts: Quantized, fmt: Format, n: int, k: int, bias: Tensor | None = None) -> Product:
    weight = Weight.of(parts, fmt, n, k).to_layout("cpu_tiles")
    return Product(weight, value_of(parts, *weight.matrix), bias)


def product(name: str, dtype: torch.dtype, n: int, k: int) -> Product:
    fmt = FORMATS[name]
    return in_tiles(quantize(samples.values(CPU, dtype, n, k), fmt), fmt, n, k, samples.bias(CPU, dtype, n))


def identity(k: int) -> Product:
    """A product whose result is the rounded input itself."""
    codes = torch.eye(k).to(torch.uint8) + 128
    return in_tiles(Quantized(codes, torch.ones(k, 1)), Format(dtype="int8"), k, k)


def scales_for(x: Tensor, act: str) -> list[Tensor | None]:
    """None, and where one may be given, a static scale that clips the largest tenth of the range."""
    return [None, (x.float().abs().amax() / 140).reshape(1, 1)] if act == "int8-tensor" else [None]


@DTYPES
@pytest.mark.parametrize("act", ACTS)
def test_every_weight(isa: str, act: str, dtype: torch.dtype) -> None:
    for name in FORMATS:
        multiply = product(name, dtype, n=40, k=192)
        for m in (1, 3, 37):
            x = samples.rows(CPU, dtype, m, 192)
            assert multiply.shortfall(x, act) <= 0, (name, m)


@pytest.mark.parametrize(("m", "act", "dtype"), turns([1, 2, 5, 8, 15, 16, 17, 31, 32, 33, 100], ACTS, FLOATS))
def test_rows_that_fill_no_tile(isa: str, m: int, act: str, dtype: torch.dtype) -> None:
    for name in ("int4-g32-int", "int4-g128", "int8-channel-none", "int8-channel-int"):
        for n, k in ((1, 128), (33, 384), (70, 100), (65, 1100), (32, 31)):
            x = samples.rows(CPU, dtype, m, k) + (0.5 if act == "int8-asym" else 0)
            multiply = product(name, dtype, n, k)
            for scale in scales_for(x, act):
                assert multiply.shortfall(x, act, scale) <= 0, (name, n, k, scale)


@DTYPES
@pytest.mark.parametrize("act", ["int8", "int8-asym"])
def test_rows_do_not_depend_on_the_others(isa: str, act: str, dtype: torch.dtype) -> None:
    """With a scale per row sums are of integers, so that a request has the same result in every batch
    (docs/troubleshooting.md)."""
    x = samples.rows(CPU, dtype, 130, 300)
    for name in FORMATS:
        multiply = product(name, dtype, n=70, k=300)
        every = multiply(x, act)
        for m in (1, 2, 3, 5, 8, 16, 17, 33, 64, 100):
            assert torch.equal(multiply(x[:m], act), every[:m]), (name, m)


def test_more_rows_than_are_worked_off_at_once(isa: str) -> None:
    for name in ("int4-g128", "int8-channel-int"):
        x = samples.rows(CPU, BF16, 1100, 256)
        assert product(name, BF16, 65, 256).shortfall(x, "int8-asym") <= 0, name


@DTYPES
@pytest.mark.parametrize("act", ACTS)
def test_codes_are_those_of_the_specification(isa: str, act: str, dtype: torch.dtype) -> None:
    """Element by element, also where x / scale lies midway between two codes, is tiny or huge, or undefined: rows of
    zeros, NaN, infinity."""
    limits = torch.finfo(dtype)
    x = torch.randn(24, 100).to(dtype)
    x[1] = 0
    x[2] = limits.max
    x[3, ::2] = -limits.max
    x[4] = limits.smallest_normal * torch.randint(-3, 4, (100,))
    x[5] = limits.smallest_normal * limits.eps * torch.randint(-300, 301, (100,))
    x[6] = torch.arange(100) - 0.5
    x[6, 99] = 127
    x[7] = (torch.arange(100) - 30) / 2
    x[7, 99] = -63.5
    x[8] = x[8].abs()
    x[9] = -x[9].abs()
    x[10] = 3
    x[11] = torch.randn(100) * limits.max / 4
    x[11] = x[11].clamp(-limits.max, limits.max)
    multiply = identity(100)
    for rows in (x, x[6:7], x[4:6]):
        assert torch.equal(multiply(rows, act), fake_quantize(rows, act).to(dtype))
    x[20, 7], x[21, 93], x[22, 0] = float("nan"), float("inf"), -float("inf")
    assert_same(multiply(x, act), fake_quantize(x, act).to(dtype))
    if act == "int8-tensor":
        for scale in (0.037, 1.0, -0.5, 1e-3, 1e-40, 1e38, 0.0, float("nan"), float("inf")):
            static = torch.tensor([[scale]])
            assert_same(multiply(x, act, static), fake_quantize(x, act, static).to(dtype))


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_a_number_that_is_not_finite_spoils_the_tensor_from_any_row(isa: str, number: str) -> None:
    multiply = identity(100)
    for row in range(5):
        x = torch.randn(5, 100)
        x[row, 3] = float(number)
        assert_same(multiply(x, "int8-tensor"), fake_quantize(x, "int8-tensor"))


def assert_same(got: Tensor, expected: Tensor) -> None:
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())


def test_halves_are_rounded_to_even_after_one_division(isa: str) -> None:
    """x / scale in float32, where multiplying by the reciprocal would pick another code: numbers within one ulp of the
    midpoint between two codes."""
    scales = torch.rand(64) + 0.5
    middles = (torch.randint(-127, 127, (64, 64)) + 0.5) * scales[:, None]
    x = torch.stack([middles, middles.nextafter(torch.tensor(1e9)), middles.nextafter(torch.tensor(-1e9))], 1)
    multiply = identity(192)
    for rows, scale in zip(x.flatten(1), scales, strict=True):
        static = scale.reshape(1, 1)
        assert torch.equal(
            multiply(rows[None], "int8-tensor", static), fake_quantize(rows[None], "int8-tensor", static)
        )


def test_empty_and_vectors(isa: str) -> None:
    multiply = product("int4-g32-int", BF16, 40, 64)
    for act in ACTS:
        assert multiply(torch.empty(0, 64, dtype=BF16), act).shape == (0, 40)
        assert multiply.shortfall(samples.rows(CPU, BF16, 1, 64)[0], act) <= 0
        assert multiply.shortfall(samples.rows(CPU, BF16, 6, 64).reshape(2, 3, 64), act) <= 0


@pytest.mark.parametrize("k", [65600, 140000])
def test_sums_do_not_overflow(isa: str, k: int) -> None:
    """The largest codes in a row whose sum of products is near and beyond the end of int32."""
    for fill in (0, 255):
        codes = torch.full((3, k), fill, dtype=torch.uint8)
        multiply = in_tiles(Quantized(codes, torch.full((3, 1), 2.0**-7)), Format(dtype="int8"), 3, k)
        for m in (1, 40):
            x = torch.full((m, k), -1.0)
            assert multiply.shortfall(x, "int8") <= 0
            assert multiply.shortfall(x, "int8-tensor", torch.full((1, 1), 1 / 128)) <= 0


def test_threads_change_nothing(isa: str) -> None:
    for name in ("int4-g128", "int8-channel-none"):
        for m in (1, 20, 150):
            x, multiply = samples.rows(CPU, BF16, m, 384), product(name, BF16, 250, 384)
            for act in ACTS:
                alone = multiply(x, act)
                torch.set_num_threads(2)
                try:
                    assert torch.equal(multiply(x, act), alone), (name, m, act)
                finally:
                    torch.set_num_threads(1)


def test_eight_threads_at_once(isa: str) -> None:
    cases = [
        (product("int4-g128", BF16, 96, 256 + 128 * i), samples.rows(CPU, BF16, 1 + 9 * i, 256 + 128 * i))
        for i in range(8)
    ]
    expected = [multiply(x, "int8-asym") for multiply, x in cases]
    wrong: list[int] = []

    def work(i: int) -> None:
        multiply, x = cases[i]
        wrong.extend(i for _ in range(20) if not torch.equal(multiply(x, "int8-asym"), expected[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("act", [*ACTS, "fp8-tensor", "fp8"])
def test_experts_share_the_rounding_of_the_tensor(act: str) -> None:
    """A per-tensor scale is measured over the rows of all experts, as in the generic kernel."""
    fmt = FORMATS["int8-channel-none"]
    parts = quantize(torch.randn(3, 40, 64), fmt)
    x = torch.randn(9, 64) * torch.tensor([1.0, 1, 10, 10, 1, 1, 1, 1, 100])[:, None]
    ends = torch.tensor([2, 4, 8], dtype=torch.int32)
    weight = Weight.of(parts, fmt, 40, 64).to_layout("cpu_tiles")
    got = OPS["dyn_grouped_linear"].overload(x, ends, *weight, act)
    rounded, expected = fake_quantize(x, act).double(), torch.zeros(9, 40, dtype=torch.float64)
    for expert, (start, end) in enumerate(((0, 2), (2, 4), (4, 8))):
        own = Quantized(parts.data[expert], parts.scale[expert])
        expected[start:end] = rounded[start:end] @ value_of(own, *weight.matrix).T
    noise = (got.double() - expected).square().sum() / expected.square().sum()
    assert samples.product_budget(FP32, 64, expected.numel()) + 10 * float(noise.log10()) <= 0
