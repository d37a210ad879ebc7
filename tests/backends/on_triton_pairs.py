"""Codes converted several at a time (pairs.py) give the same numbers and products as one at a time. Run by
test_triton.py, like on_triton.py."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bitport.backends.triton import configs, decode, linear, product, rows
from bitport.numerics import NUMBER_TYPES, Format, to_storage
from bitport.ops import Sample, Weight
from bitport.schemes import Scheme, preset
from tests.backends.products import products, shortfall
from tests.turns import turns

DEVICE = torch.device(os.environ["TRITON_DEVICE"])
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DEFAULT = json.loads((configs.FOLDER / "default.json").read_text())
SINGLE = configs.Config(DEFAULT)
SEVERAL = configs.Config(DEFAULT, halves=True, float8=True)
OLDER = configs.Config(DEFAULT, halves=True)
"""A device without conversion instructions for float8_e4m3."""

if DEVICE.type == "cpu":
    from tests.backends import interpreter

    interpreter.correct()
elif not (configs.of(DEVICE).halves and configs.of(DEVICE).float8):
    pytest.skip("this device has no packed arithmetic", allow_module_level=True)


@pytest.fixture(autouse=True)
def paths(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each product, whether it was asked to take codes several at a time."""
    taken: list[bool] = []
    launch: Callable[..., Any] = product.tiles.__class__.__getitem__

    def noted(kernel: Any, grid: Any) -> Any:
        run = launch(kernel, grid)

        def call(*args: Any, **constants: Any) -> Any:
            if "PAIRS" in constants:
                taken.append(constants["PAIRS"])
            return run(*args, **constants)

        return call

    monkeypatch.setattr(product.tiles.__class__, "__getitem__", noted)
    return taken


def tiles(sample: Sample, scheme: str | Scheme, config: configs.Config) -> Tensor:
    x, *rest = (arg.to(DEVICE) if isinstance(arg, Tensor) else arg for arg in sample.args)
    act = (scheme if isinstance(scheme, Scheme) else preset(scheme)).act
    held = linear.prepared(x, *((rest[10], rest[11]) if act else ("", None)))
    return linear.tiles(held, Weight(*rest[:10]), rest[-1], x.dtype, config).cpu()


SHAPES = ((17, 65, 264), (1, 20, 100), (3, 33, 7), (5, 64, 1032))
SCHEMES = (
    *("int4", "int4-sym", "int4-g32", "int4-g32-sym", "int4-channel", "int3-g32", "int3-channel-sym", "int2-g64"),
    *("fp8-wo", "fp8-e5m2-wo", "mxfp8-wo", "int4-int8", "int4-int8-g64-sym", "int4-int8-channel"),
)


def assert_same_products(scheme: str, dtype: torch.dtype, config: configs.Config) -> None:
    """Within the budget, and equal to those of one code at a time up to the order of float32 sums: an ulp of a result,
    or of a sum that has cancelled."""
    for m, n, k in SHAPES:
        (sample,) = products(scheme, dtype, "plain", n=n, k=k, m=m)
        several, single = tiles(sample, scheme, config), tiles(sample, scheme, SINGLE)
        assert shortfall(sample, several) <= 0
        most = float(single.abs().max())
        torch.testing.assert_close(several, single, rtol=torch.finfo(dtype).eps, atol=k * 2.0**-24 * most)


def every_code(n: int, k: int) -> Tensor:
    """[n, k] of sixteen codes, each at every position of a unit."""
    column = torch.arange(k)
    return (torch.arange(n)[:, None] * 3 + column * (column // 16 % 2 * 4 + 1)) % 16


@pytest.mark.parametrize(("scheme", "dtype"), turns(SCHEMES, [BF16, FP16]))
def test_products_are_those_of_one_at_a_time(scheme: str, dtype: torch.dtype, paths: list[bool]) -> None:
    assert_same_products(scheme, dtype, SEVERAL)
    assert paths == [True, False] * len(SHAPES)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("scheme", ["fp8-wo", "fp8-wo-g48", "mxfp8-wo"])
def test_float8_by_its_bits(scheme: str, dtype: torch.dtype, paths: list[bool]) -> None:
    assert_same_products(scheme, dtype, OLDER)
    assert paths == [True, False, True, False, False, False, True, False], "rows of 7 columns are in no words"


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    ("number", "block", "scale"),
    [("float4_e2m1", 16, "input"), ("float4_e2m1", 128, "e4m3"), ("float4_e2m1", 0, "input"), ("int4", 16, "e4m3")],
)
def test_other_scales(number: str, block: int, scale: str, dtype: torch.dtype, paths: list[bool]) -> None:
    """Scales within a step must fit 16 bits; those of a whole step, or a row, may be any."""
    scheme = Scheme(weight=Format(dtype=number, block=(1, block), scale=scale))
    for m, n, k in SHAPES:
        (sample,) = products(scheme, dtype, "plain", n=n, k=k, m=m)
        assert shortfall(sample, tiles(sample, scheme, SEVERAL)) <= 0
    assert paths == [True] * len(SHAPES)


@pytest.mark.parametrize(("scheme", "dtype"), [("mxfp4-wo", BF16), ("nvfp4-wo", BF16), ("nvfp4-wo", FP16)])
def test_blocks_of_float4(scheme: str, dtype: torch.dtype, paths: list[bool]) -> None:
    """Every code at every position of a unit, with scales that differ by a factor of up to 2^12. Bit for bit: a row of
    y is a row of the weight."""
    n, k = 64, 256
    (sample,) = products(scheme, dtype, "plain", n=n, k=k, m=1, with_bias=False)
    _, _, scale, *rest = sample.args
    codes = (torch.arange(n)[:, None] + torch.arange(k)) % 16
    powers = (torch.arange(scale.numel()).view(scale.shape) * 5 % 13 - 6.0).exp2()
    args = [torch.eye(k, dtype=dtype), to_storage(codes.to(torch.uint8), NUMBER_TYPES["float4_e2m1"])]
    changed = Sample(sample.name, (*args, powers.to(scale.dtype), *rest), sample.expected, sample.budget)
    weight = Weight(*changed.args[1:11])
    assert torch.equal(tiles(changed, scheme, SEVERAL), weight.dense(FP32).t().to(dtype))
    assert paths == [True]


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("scheme", ["nf4", "nf4-g256", "nf4-channel"])
def test_entries_of_a_table(scheme: str, dtype: torch.dtype, paths: list[bool]) -> None:
    """Table entries are rounded instead of their products with the scale."""
    for m, n, k in SHAPES:
        (sample,) = products(scheme, dtype, "plain", n=n, k=k, m=m)
        assert shortfall(sample, tiles(sample, scheme, SEVERAL)) <= 0
    assert paths == [True] * len(SHAPES)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_every_entry_at_every_place(dtype: torch.dtype, paths: list[bool]) -> None:
    """Bit for bit: a row of y is a row of the weight."""
    n, k = 64, 256
    (sample,) = products("nf4", dtype, "plain", n=n, k=k, m=1, with_bias=False)
    _, _, scale, *rest = sample.args
    codes = every_code(n, k)
    powers = (torch.arange(scale.numel()).view(scale.shape) * 5 % 7 - 3.0).exp2()
    args = [torch.eye(k, dtype=dtype), to_storage(codes.to(torch.uint8), NUMBER_TYPES["nf4"])]
    changed = Sample(sample.name, (*args, powers.to(scale.dtype), *rest), sample.expected, sample.budget)
    want = torch.tensor(NUMBER_TYPES["nf4"].table).to(dtype)[codes] * powers.repeat_interleave(64, 1).to(dtype)
    assert torch.equal(tiles(changed, "nf4", SEVERAL), want.t())
    assert paths == [True]


@pytest.mark.parametrize("k", [40, 160, 288])
@pytest.mark.parametrize("name", ["int3", "int5", "int6", "int7", "float6_e2m3"])
def test_codes_in_words_of_32_bits(name: str, k: int) -> None:
    """Units may begin anywhere in a word; with 40 columns rows do too."""
    number, n = NUMBER_TYPES[name], 9
    codes = torch.randint(0, number.qmax + 1, (n, k), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    weight = Weight(to_storage(codes, number), torch.ones(n, 1), None, None, name, n, k, 1, k, "plain")
    here = Weight(*(part.to(DEVICE) if isinstance(part, Tensor) else part for part in weight))
    assert torch.equal(rows.dense(here, FP32).cpu(), weight.dense(FP32))
    x = torch.eye(k, device=DEVICE)[:: k // 8]
    got = linear.gemv(linear.prepared(x, "", None), here, None, FP32, SEVERAL)
    assert torch.equal(got.cpu(), weight.dense(FP32).t()[:: k // 8])


@pytest.mark.parametrize("scheme", ["nf4", "nf4-channel"])
def test_entries_in_float32(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every code at every position, bit for bit: entries are assembled from four bytes. The interpreter does so only if
    told to."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(decode, "permutes", lambda: True)
    n, k = 32, 192
    fmt = preset(scheme).weight
    codes = every_code(n, k)
    scale = torch.rand(fmt.scale_shape(n, k), generator=torch.Generator().manual_seed(0)) + 0.5
    stored = to_storage(codes.to(torch.uint8), NUMBER_TYPES["nf4"])
    weight = Weight(stored.to(DEVICE), scale.to(DEVICE), None, None, "nf4", n, k, *fmt.block_shape(n, k), "plain")
    value = torch.tensor(NUMBER_TYPES["nf4"].table)[codes] * scale.repeat_interleave(weight.block_k, 1)
    assert torch.equal(rows.dense(weight, FP32).cpu(), value)
    for at in range(0, n, 5):
        x = torch.zeros(1, k, device=DEVICE)
        x[0, at] = 1.0
        got = linear.gemv(linear.prepared(x, "", None), weight, None, FP32, SEVERAL)
        assert torch.equal(got.cpu()[0], value[:, at])


@pytest.mark.parametrize("scheme", ["int4-g20", "int4-g32-fzero", "int8", "nf4-g32", "nf4-g48", "int5"])
def test_what_is_taken_one_at_a_time(scheme: str, paths: list[bool]) -> None:
    """Groups that end within a unit, short groups of a table, fractional zero points, and codes that do not fit 16 bits
    above a base."""
    (sample,) = products(scheme, BF16, "plain", n=20, k=80, m=2)
    assert shortfall(sample, tiles(sample, scheme, SEVERAL)) <= 0
    assert paths == [False]


def test_scales_of_another_type_are_not_rounded(paths: list[bool]) -> None:
    """A scale within a step is multiplied in 16 bits only if it already has that type."""
    (sample,) = products("int4-g32", BF16, "plain", n=20, k=256, m=2)
    x, data, scale, *rest = sample.args
    wide = Sample(sample.name, (x, data, scale.float() * 1.001, *rest), sample.expected, sample.budget)
    assert torch.equal(tiles(wide, "int4-g32", SEVERAL), tiles(wide, "int4-g32", SINGLE))
    assert paths == [False, False]


WHOLE = [name for name, number in NUMBER_TYPES.items() if number.kind == "int" and 1 < number.bits <= 4]
PLACES = (*range(32), 263)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    ("name", "k", "config"),
    [
        *((name, 264, SEVERAL) for name in (*WHOLE, "float8_e4m3", "float8_e5m2")),
        *(("int3", 288, SEVERAL), ("float8_e4m3", 264, OLDER)),
    ],
)
def test_every_code_at_every_place(
    name: str, k: int, config: configs.Config, dtype: torch.dtype, paths: list[bool]
) -> None:
    """Each row has one code at one position, and x is ones. Special values too, and zero points at both ends:
    the largest is one more than a code."""
    number = NUMBER_TYPES[name]
    codes = torch.zeros(len(PLACES), number.qmax + 1, k, dtype=torch.uint8)
    for at, place in enumerate(PLACES):
        codes[at, :, place] = torch.arange(number.qmax + 1)
    stored = to_storage(codes.flatten(0, 1), number)
    n = stored.shape[0]
    for zero in (None,) if number.kind == "float" else (None, 0, number.qmax + 1):
        shift = None if zero is None else torch.full((n, 1), zero, dtype=torch.uint8)
        weight = Weight(stored, torch.ones(n, 1), shift, None, name, n, k, 1, k, "plain")
        here = Weight(*(part.to(DEVICE) if isinstance(part, Tensor) else part for part in weight))
        x = torch.ones(1, k, dtype=dtype)
        got = linear.tiles(linear.prepared(x.to(DEVICE), "", None), here, None, dtype, config).cpu()[0]
        want = weight.dense(FP32).double().sum(1).to(dtype)
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.nan_to_num(), want.nan_to_num())
    assert all(paths)
