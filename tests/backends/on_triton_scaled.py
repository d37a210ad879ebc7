"""Scaled products of blocks, against float64. Run by test_triton.py, like on_triton.py: the interpreter supports them,
even where a device has no unit for them."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from bitport.backends.triton import configs, kernels, scaled
from bitport.backends.triton.configs import Config
from bitport.numerics import Format, fake_quantize
from bitport.ops import Weight
from bitport.schemes import Scheme, preset
from tests.backends.products import products, shortfall
from tests.turns import turns

DEVICE = torch.device(os.environ["TRITON_DEVICE"])
BF16 = torch.bfloat16
CONTENT = configs.of(DEVICE).content

if DEVICE.type == "cpu":
    from tests.backends import interpreter

    interpreter.correct()


@pytest.fixture(autouse=True)
def takes_scales(monkeypatch: pytest.MonkeyPatch) -> Config:
    if DEVICE.type == "cpu" and not interpreter.SCALED:
        pytest.skip("the interpreter of this Triton has no products of blocks with their scales")
    if DEVICE.type != "cpu" and not configs.of(DEVICE).scaled:
        pytest.skip("this device multiplies no blocks with their scales")
    config = Config(CONTENT, scaled=tuple(scaled.BLOCKS), mixed=True)
    monkeypatch.setattr(configs, "of", lambda device: config)
    return config


def here(args: tuple[Any, ...]) -> list[Any]:
    return [arg.to(DEVICE) if isinstance(arg, Tensor) else arg for arg in args]


E5M2 = Format(dtype="float8_e5m2", block=(1, 32), scale="e8m0", scale_rule="rceil")
MIXED = {
    "mxfp4 by mxfp8": dataclasses.replace(preset("mxfp4"), act="mxfp8"),
    "mxfp8 by mxfp4": dataclasses.replace(preset("mxfp8"), act="mxfp4"),
    "e5m2 by mxfp8": Scheme(weight=E5M2, act="mxfp8"),
}
"""Weights and inputs of different element types, in blocks of the same form."""
SCHEMES = {**{name: preset(name) for name in scaled.BLOCKS}, **MIXED}


@pytest.mark.parametrize(
    ("scheme", "m", "n", "k"), turns(SCHEMES, [(1, 48, 256), (70, 65, 288), (3, 1, 32), (130, 33, 1024)])
)
def test_products(scheme: str, m: int, n: int, k: int) -> None:
    (sample,) = products(SCHEMES[scheme], BF16, "plain", n=n, k=k, m=m)
    args = here(sample.args)
    assert kernels.refuses_scaled(*args) is None
    assert shortfall(sample, kernels.run_scaled(*args).cpu()) <= 0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_budget_can_fail(scheme: str) -> None:
    """One doubled scale is noticed."""
    (sample,) = products(SCHEMES[scheme], BF16, "plain", n=48, k=256, m=5)
    x, data, scale, *rest = here(sample.args)
    wrong = scale.clone()
    wrong[0, 0] = (wrong[0, 0].float() * 2).to(wrong.dtype)
    assert shortfall(sample, kernels.run_scaled(x, data, wrong, *rest).cpu()) > 3


@pytest.mark.parametrize("scheme", scaled.BLOCKS)
def test_inputs_of_every_kind(scheme: str) -> None:
    """Without a bias, of any rank, strided, all zero."""
    for sample in products(scheme, BF16, "plain", n=24, k=96, with_bias=False):
        args = here(sample.args)
        if args[0].numel():
            assert shortfall(sample, kernels.run_scaled(*args).cpu()) <= 0
        else:
            assert kernels.refuses_scaled(*args) == "x has no rows"


def test_splits_of_k(monkeypatch: pytest.MonkeyPatch) -> None:
    (sample,) = products("mxfp4", BF16, "plain", n=24, k=2080, m=2)
    for programs in (1, 3, 1000):
        blocks = [{**each, "programs": programs} for each in CONTENT["scaled"]]
        config = Config({**CONTENT, "scaled": blocks}, scaled=("mxfp4",))
        monkeypatch.setattr(configs, "of", lambda device, config=config: config)
        assert shortfall(sample, kernels.run_scaled(*here(sample.args)).cpu()) <= 0


@pytest.mark.parametrize("scheme", scaled.BLOCKS)
def test_a_block_that_is_no_number_is_nan_alone(scheme: str) -> None:
    (sample,) = products(scheme, BF16, "plain", n=24, k=96, m=4)
    x, *rest = here(sample.args)
    x[2, 40] = float("inf")
    y = kernels.run_scaled(x, *rest)
    assert y.isnan().all(1).tolist() == [False, False, True, False]
    assert not y[:2].isnan().any()


@pytest.mark.parametrize(
    ("scheme", "change", "reason"),
    [
        ("mxfp8", {"k": 80}, "K must be a multiple of 32 and N not 0; they are 80"),
        ("mxfp8", {"x": torch.float32}, "x must be bfloat16, not torch.float32"),
        ("mxfp8", {"act": "nvfp4"}, "with nvfp4 inputs the weight must be float4_e2m1 with torch.float8_e4m3fn scales"),
        ("nvfp4", {"act": "mxfp4"}, "per 1x32 block, not float4_e2m1 with torch.float8_e4m3fn scales per 1x16"),
        ("mxfp6", {}, "must be float8_e4m3 or float8_e5m2 or float4_e2m1 with torch.float8_e8m0fnu scales"),
        ("fp8-block", {}, "take no scales of fp8-128, but those of mxfp8, mxfp4, nvfp4"),
    ],
    ids=["K", "dtype", "another input", "other scales", "another weight", "long blocks"],
)
def test_refused(scheme: str, change: dict[str, Any], reason: str) -> None:
    (sample,) = products(scheme, change.get("x", BF16), "plain", n=24, k=change.get("k", 96), m=2)
    args = list(sample.args)
    args[11] = change.get("act", args[11])
    assert reason in str(kernels.refuses_scaled(*args))


def experts_of(scheme: str, n: int = 33, k: int = 288, rows: int = 40) -> list[Any]:
    """Arguments for three experts that hold one weight, each rotated by some outputs; the caller sets the ends."""
    (sample,) = products(SCHEMES[scheme], BF16, "plain", n=n, k=k, m=rows)
    x, *rest = sample.args
    parts = [None if part is None else turned(part) for part in rest[:4]]
    return [x, torch.empty(0), *parts, *rest[4:10], rest[10]]


def turned(part: Tensor) -> Tensor:
    raw = part.view(torch.uint8) if part.dtype.itemsize == 1 else part
    every = [raw.roll(5 * expert, 0) for expert in range(3)] if raw.shape[0] > 1 else [raw * 2**e for e in range(3)]
    return torch.stack(every).view(part.dtype)


@pytest.mark.parametrize("bounds", [(0, 0, 0), (0, 40, 40), (17, 18, 40), (1, 2, 3)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts(scheme: str, bounds: tuple[int, ...]) -> None:
    """Against float64, each expert's rows by its own weight; rows past the last end are zero."""
    args = experts_of(scheme)
    x, weight = args[0], Weight(*args[2:12])
    args[1] = torch.tensor(bounds, dtype=torch.int32)
    assert kernels.refuses_grouped_scaled(*here(args)) is None
    y = kernels.run_grouped_scaled(*here(args)).cpu().double()
    rounded = fake_quantize(x, args[12]).double()
    dense, start = weight.dense(torch.float32).double(), 0
    for expert, end in enumerate(bounds):
        want = rounded[start:end] @ dense[expert].t()
        assert (y[start:end] - want).norm() <= 2**-8 * want.norm(), "one rounding to bfloat16"
        start = end
    assert not y[start:].any()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_are_told_apart(scheme: str) -> None:
    """The test above cannot pass with one weight for all experts."""
    dense = Weight(*experts_of(scheme)[2:12]).dense(torch.float32)
    assert (dense[0] - dense[1]).norm() > 0.5 * dense[0].norm()
    assert (dense[1] - dense[2]).norm() > 0.5 * dense[1].norm()


def test_ends_that_are_wrong_read_nothing_else() -> None:
    args = experts_of("mxfp8")
    for bounds in ((5, 3, 7), (-1, 100, 2), (1000, 1000, 1000)):
        args[1] = torch.tensor(bounds, dtype=torch.int32)
        assert kernels.run_grouped_scaled(*here(args)).shape == (40, 33)


def test_no_experts_are_refused() -> None:
    args = experts_of("mxfp8")
    args[1] = torch.empty(0, dtype=torch.int32)
    assert kernels.refuses_grouped_scaled(*args) == "there are no experts"
    assert kernels.refuses_grouped(*args) == "there are no experts"


def test_which_chips_have_it() -> None:
    found = {name: configs.multiplies_scaled(name) for name in ("sm90", "sm100", "sm120", "gfx942", "gfx950", "xpu")}
    assert found == {
        **dict.fromkeys(("sm90", "gfx942", "xpu"), ()),
        **dict.fromkeys(("sm100", "sm120"), ("mxfp8", "mxfp4", "nvfp4")),
        "gfx950": ("mxfp8", "mxfp4"),
    }


def test_some_chips_take_as_many_bits_on_both_sides_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "of", lambda device: Config(CONTENT, scaled=tuple(scaled.BLOCKS)))
    refused = {}
    for name in SCHEMES:
        (sample,) = products(SCHEMES[name], BF16, "plain", n=24, k=96, m=2)
        refused[name] = kernels.refuses_scaled(*sample.args)
    assert {name for name, reason in refused.items() if reason} == {"mxfp4 by mxfp8", "mxfp8 by mxfp4"}
    assert "not float4_e2m1 with mxfp8 inputs" in str(refused["mxfp4 by mxfp8"])
    assert [name for name in ("sm90", "sm100", "sm103", "sm120", "gfx950") if configs.multiplies_mixed(name)] == [
        *("sm100", "sm103", "gfx950")
    ]


def test_other_chips_refuse_it(takes_scales: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "of", lambda device: Config(CONTENT))
    (sample,) = products("mxfp8", BF16, "plain", n=24, k=96, m=2)
    assert "take no scales of mxfp8, but those of no format" in str(kernels.refuses_scaled(*sample.args))
    takers = [name for op, name, _, refuses in kernels.KERNELS if op == "dyn_linear" and not refuses(*sample.args)]
    assert takers == ["triton_tiles"]
    assert Weight(*sample.args[1:11]).dtype == "float8_e4m3"
