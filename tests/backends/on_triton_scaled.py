"""Products of blocks with their scales, against float64. Run by test_triton.py, as on_triton.py: the interpreter takes
them on every device, which a device without such units does not."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from bitport.backends.triton import configs, kernels, scaled
from bitport.backends.triton.configs import Config
from bitport.ops import Weight
from tests.backends.products import products, shortfall

DEVICE = torch.device(os.environ["TRITON_DEVICE"])
BF16 = torch.bfloat16
CONTENT = configs.of(DEVICE).content

if DEVICE.type == "cpu":
    from tests.backends.interpreter import correct_bfloat16, correct_scales

    correct_bfloat16()
    correct_scales()


@pytest.fixture(autouse=True)
def takes_scales(monkeypatch: pytest.MonkeyPatch) -> Config:
    if DEVICE.type != "cpu" and not configs.of(DEVICE).scaled:
        pytest.skip("this device multiplies no blocks with their scales")
    config = Config(CONTENT, scaled=tuple(scaled.KINDS))
    monkeypatch.setattr(configs, "of", lambda device: config)
    return config


def here(args: tuple[Any, ...]) -> list[Any]:
    return [arg.to(DEVICE) if isinstance(arg, Tensor) else arg for arg in args]


@pytest.mark.parametrize(("m", "n", "k"), [(1, 48, 256), (70, 65, 288), (3, 1, 32), (130, 33, 1024)])
@pytest.mark.parametrize("scheme", scaled.KINDS)
def test_products(scheme: str, m: int, n: int, k: int) -> None:
    (sample,) = products(scheme, BF16, "plain", n=n, k=k, m=m)
    args = here(sample.args)
    assert kernels.refuses_scaled(*args) is None
    assert shortfall(sample, kernels.run_scaled(*args).cpu()) <= 0


@pytest.mark.parametrize("scheme", scaled.KINDS)
def test_the_budget_can_fail(scheme: str) -> None:
    """One scale that is doubled is seen."""
    (sample,) = products(scheme, BF16, "plain", n=48, k=256, m=5)
    x, data, scale, *rest = here(sample.args)
    wrong = scale.clone()
    wrong[0, 0] = (wrong[0, 0].float() * 2).to(wrong.dtype)
    assert shortfall(sample, kernels.run_scaled(x, data, wrong, *rest).cpu()) > 3


@pytest.mark.parametrize("scheme", scaled.KINDS)
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


@pytest.mark.parametrize("scheme", scaled.KINDS)
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
        ("mxfp8", {"act": "mxfp4"}, "with mxfp4 inputs the weight must be mxfp4 as well"),
        ("mxfp6", {}, "with mxfp8 inputs the weight must be mxfp8 as well, not float6_e2m3"),
        ("fp8-block", {}, "take no scales of fp8-128, but those of mxfp8, mxfp4, nvfp4"),
    ],
    ids=["K", "dtype", "another input", "another weight", "long blocks"],
)
def test_refused(scheme: str, change: dict[str, Any], reason: str) -> None:
    (sample,) = products(scheme, change.get("x", BF16), "plain", n=24, k=change.get("k", 96), m=2)
    args = list(sample.args)
    args[11] = change.get("act", args[11])
    assert reason in str(kernels.refuses_scaled(*args))


def test_which_chips_have_it() -> None:
    found = {name: configs.multiplies_scaled(name) for name in ("sm90", "sm100", "sm120", "gfx942", "gfx950", "xpu")}
    assert found == {
        **dict.fromkeys(("sm90", "gfx942", "xpu"), ()),
        **dict.fromkeys(("sm100", "sm120"), ("mxfp8", "mxfp4", "nvfp4")),
        "gfx950": ("mxfp8", "mxfp4"),
    }


def test_other_chips_refuse_it(takes_scales: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "of", lambda device: Config(CONTENT))
    (sample,) = products("mxfp8", BF16, "plain", n=24, k=96, m=2)
    assert "take no scales of mxfp8, but those of no format" in str(kernels.refuses_scaled(*sample.args))
    takers = [name for op, name, _, refuses in kernels.KERNELS if op == "dyn_linear" and not refuses(*sample.args)]
    assert takers == ["triton_tiles"]
    assert Weight(*sample.args[1:11]).dtype == "float8_e4m3"
