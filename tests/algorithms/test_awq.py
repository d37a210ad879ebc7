"""AWQ: its error is that of the outputs, its scales help on uneven inputs, and models compute the same as before."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitport
from bitport.algorithms import AWQ, GPTQ, RTN, Chain, algorithm
from bitport.algorithms.awq_core import Factor, errors, search, sizes
from bitport.algorithms.scales_core import few_rows, power
from bitport.algorithms.solving import uses_data
from bitport.errors import ArgumentError
from bitport.numerics import quantize, sqnr
from bitport.schemes import preset

from .families import batch_of, model_of, output
from .weights import inputs, output_error, seen, value, weight

SCHEMES = ("int3-g32", "int4", "int4-channel", "nvfp4", "mxfp4", "fp8-block", "nf4", "int8")


def uneven(k: int = 150) -> Tensor:
    """Inputs with a few large channels."""
    x = inputs(k)
    x[:, ::29] *= 30
    return x


def factor(w: Tensor, x: Tensor, scheme: str, channels: Tensor | None = None) -> Factor:
    found = seen(x)
    every = torch.arange(w.shape[-1]) if channels is None else channels
    return Factor(w, preset(scheme).weight, found.gram, found.rows, every)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_error_is_that_of_the_outputs(scheme: str, dtype: torch.dtype) -> None:
    """Against float64, for what is stored: the scaled weight, rounded, with inputs divided. The Gram matrix is a
    float32 sum of 400 products."""
    w, x = weight(dtype=dtype), uneven()
    found = search([factor(w, x, scheme)], (150,))
    for scale, error in ((found.scale, found.error), (torch.ones(150), found.error_plain)):
        scaled = (w.float() * scale).to(dtype)
        rounded = value(quantize(scaled, preset(scheme).weight), scheme, *w.shape) / scale.double()
        assert float(error) == pytest.approx(float(output_error(w, rounded, x).sum()), rel=2.0**-10)


@pytest.mark.parametrize("scheme", ["int3-g32", "int4", "int4-channel", "nf4"])
def test_large_inputs_are_kept_precise(scheme: str) -> None:
    found = search([factor(weight(), uneven(), scheme)], (150,))
    assert found.gain > 2
    assert float(found.scale[::29].mean()) > 2 * float(found.scale.mean())


@pytest.mark.parametrize("scheme", ["int3-g32", "int4-channel", "nf4"])
def test_wide_columns_do_not_cost_the_others_their_precision(scheme: str) -> None:
    """They set the scale of their block although their inputs are like all others."""
    w = weight()
    w[:, ::7] *= 8
    found = search([factor(w, inputs(), scheme)], (150,))
    assert found.gain > 2
    assert float(found.scale[::7].mean()) < float(found.scale.mean()) / 2


@pytest.mark.parametrize("steps", [2, 10, 20, 50])
@pytest.mark.parametrize("scheme", ["int3-g32", "int4-channel", "mxfp4"])
def test_the_next_steps_of_alpha_are_no_better(scheme: str, steps: int) -> None:
    """Although most steps are never tried."""
    factors = [factor(weight(), uneven(), scheme)]
    found, (x, w) = search(factors, (150,), steps), sizes(factors, (150,))
    for by_weights in (0.0, 1.0):
        scales = [power(x, step / steps, w, by_weights * (1 - step / steps)) for step in range(steps + 1)]
        at = next((at for at, scale in enumerate(scales) if torch.allclose(scale, found.scale)), None)
        if at is not None:
            break
    assert at is not None
    for scale in scales[max(0, at - 1) : at + 2]:
        assert float(errors(factors, scale)) >= float(found.error) * (1 - 2.0**-16)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_scale_is_always_a_choice(scheme: str) -> None:
    x = torch.randn(400, 150)
    found = search([factor(torch.rand(24, 150) + 1, x, scheme)], (150,))
    assert bool((found.error <= found.error_plain).all())


def test_channels_that_serve_several_inputs_share_a_scale() -> None:
    w, x = weight(16, 64), uneven(64)
    channels = torch.arange(32).view(2, 16).repeat_interleave(2, 0).reshape(-1)
    found = search([factor(w, x, "int4-channel", channels)], (32,))
    spread = found.scale[channels]
    rounded = value(quantize(w * spread, preset("int4-channel").weight), "int4-channel", *w.shape) / spread.double()
    assert float(found.error) == pytest.approx(float(output_error(w, rounded, x).sum()), rel=2.0**-10)


def test_experts_have_scales_of_their_own_or_share_one() -> None:
    w, x = torch.stack([weight(), 2 * weight()]), [uneven(), uneven().flip(1)]
    parts = [factor(each, rows, "int4-channel") for each, rows in zip(w, x, strict=True)]
    both = Factor(
        w, parts[0].fmt, torch.stack([p.gram for p in parts]), torch.stack([p.rows for p in parts]), parts[0].channels
    )
    own, alone = search([both], (2, 150)), [search([part], (150,)) for part in parts]
    torch.testing.assert_close(own.scale, torch.stack([found.scale for found in alone]))
    shared, together = search([both], (150,)), search(parts, (150,))
    torch.testing.assert_close(shared.error, together.error, rtol=1e-4, atol=0)
    assert float(own.error.sum()) <= float(shared.error)
    assert own.gain == pytest.approx(10 * math.log10(float(own.error_plain.sum()) / float(own.error.sum())))


@pytest.mark.parametrize("wide", [1.0, 1e9])
def test_norms_in_float16_can_hold_the_scales(wide: float) -> None:
    """They are centred at 1, and limited. (An input that is larger than all others by far gets the largest scale.)"""
    x = uneven()
    x[:, 3] *= wide
    scale = search([factor(weight(), x, "int4-channel")], (150,)).scale
    assert float(scale.max() * scale.min()) == pytest.approx(1, rel=2.0**-16)
    assert 1 < float(scale.max()) <= 1024


def test_of_many_rows_some_are_looked_at() -> None:
    rows = few_rows(torch.arange(1000.0)[:, None], preset("int4").weight).flatten()
    torch.testing.assert_close(rows, torch.linspace(0, 1000 - 1000 / 256, 256), rtol=0, atol=1)


def test_channels_without_input_keep_their_scale() -> None:
    x = uneven()
    x[:, 3] = 0
    found = search([factor(weight(), x, "int4-channel")], (150,))
    assert float(found.scale[3]) == 1
    assert bool(found.scale.isfinite().all())
    assert found.gain > 2, "the others still have scales"
    silent = search([factor(weight(), torch.zeros(5, 150), "int4")], (150,))
    assert torch.equal(silent.scale, torch.ones(150))


class Step(nn.Module):
    """A norm, a layer that it feeds, and one after a GELU, into which no scale can be folded."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)
        with torch.no_grad():
            self.norm.weight[::9] *= 20
            self.up.weight[::11] *= 20

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Unequal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Step(), Step()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(scope="module")
def model() -> Unequal:
    torch.manual_seed(0)
    return Unequal()


DATA = [torch.randn(40, 64, generator=torch.Generator().manual_seed(at)) for at in range(4)]


def test_scales_go_into_the_norm_or_are_multiplied_in(model: Unequal) -> None:
    x, errors = torch.randn(100, 64), {}
    for name in ("rtn", "awq", "awq+gptq"):
        other = copy.deepcopy(model)
        data = DATA if uses_data(name, "int4-channel") else None
        report = bitport.quantize_(other, "int4-channel", algorithm=name, calibrate=data)
        errors[name] = sqnr(model(x), other(x))
    assert errors["rtn"] + 1 < errors["awq"] < errors["awq+gptq"]
    told = {layer.name: layer.note for layer in report.layers}
    assert "awq: norm.weight takes a scale" in told["layers.0.up.weight"]
    assert "multiplied by a scale at run time" in told["layers.0.down.weight"]
    first = other.get_submodule("layers.0")
    assert first.get_parameter("up.weight").pre_scale is None  # type: ignore[attr-defined]
    assert first.get_parameter("down.weight").pre_scale is not None  # type: ignore[attr-defined]
    assert not torch.equal(first.get_parameter("norm.weight"), model.get_parameter("layers.0.norm.weight"))
    for layer in report.quantized:  # compared with rounding to nearest, in the outputs of the original layer
        assert layer.output_sqnr is not None
        assert layer.output_sqnr_rtn is not None
        assert layer.output_sqnr > layer.output_sqnr_rtn


def test_scales_at_run_time_are_saved(model: Unequal, tmp_path: Path) -> None:
    """The value of such a weight is that of the original weight: both forms compute the same in float32."""
    other, x = copy.deepcopy(model), torch.randn(9, 64)
    bitport.quantize_(other, "int4-channel", algorithm="awq", calibrate=DATA)
    bitport.save(other, tmp_path)
    loaded = bitport.load(Unequal, tmp_path)
    assert torch.equal(loaded(x), other(x))
    assert sqnr(bitport.dequantize_(copy.deepcopy(other))(x), other(x)) > 100


def test_a_scale_at_run_time_must_be_worth_it(model: Unequal) -> None:
    report = bitport.quantize_(
        copy.deepcopy(model), "int4-channel", algorithm=(AWQ(least_gain=99),), calibrate=DATA, measure=False
    )
    told = next(layer.note for layer in report.layers if layer.name == "layers.0.down.weight")
    assert "nothing before it takes a scale; at run time a scale would gain" in told


@pytest.mark.parametrize("name", ["llama", "gemma", "phi3", "gpt2", "bert", "whisper", "mixtral", "gpt-oss"])
def test_every_family_is_nearer_than_rounded_to_nearest(name: str) -> None:
    """Some channels of every norm are made large, as in trained models."""
    model = model_of(name)
    with torch.no_grad():
        for key, param in model.named_parameters():
            if param.dim() == 1 and ("norm" in key.lower() or "ln_" in key) and param.numel() == 64:
                param[::13] += 8
    before, errors = output(model, name), {}
    for how in ("rtn", "awq"):
        other = copy.deepcopy(model)
        data = [batch_of(name, 8)] if uses_data(how, "int4-channel") else None
        bitport.quantize_(other, "int4-channel", algorithm=how, calibrate=data, measure=False)
        errors[how] = sqnr(before, output(other, name))
    assert errors["awq"] > errors["rtn"]


def test_names_of_several_steps() -> None:
    chain = algorithm("awq+gptq")
    assert isinstance(chain, Chain)
    assert (chain.name, chain.transforms, chain.solver) == ("awq+gptq", (AWQ(),), GPTQ())
    own = algorithm((AWQ(steps=5), "rtn"))
    assert isinstance(own, Chain)
    assert (own.name, own.transforms, own.solver) == ("awq+rtn", (AWQ(steps=5),), RTN())
    assert algorithm("awq").name == "awq"
    assert algorithm(AWQ(steps=5)) == algorithm((AWQ(steps=5),))
    assert algorithm(("gptq",)) == GPTQ()


@pytest.mark.parametrize("given", ["gptq+awq", "rtn+gptq", ()], ids=["order", "two", "none"])
def test_chains_that_are_none(given: str) -> None:
    with pytest.raises(ArgumentError, match="give transforms"):
        algorithm(given)
