"""SmoothQuant: its error is that of the rounded product, and outlier channels stop hurting int8 inputs."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bitport
from bitport.algorithms import Smooth
from bitport.algorithms.smooth_core import Factor, search
from bitport.algorithms.solving import uses_data
from bitport.numerics import fake_quantize, quantize, sqnr
from bitport.schemes import preset

from .families import batch_of, model_of, output, plant_outliers
from .weights import inputs, value, weight

SCHEMES = ("int8-dyn", "int8-static", "int4-int8", "fp8-row", "mxfp4", "nvfp4")


def outliers() -> Tensor:
    """Inputs with two channels fifty times as large as the others, in every token."""
    x = inputs(rows=100)
    x[:, [5, 77]] *= 50
    return x


def factor(w: Tensor, x: Tensor, scheme: str) -> Factor:
    return Factor(w, preset(scheme).weight, preset(scheme).act, [((), x)], torch.arange(w.shape[-1]))


def error(w: Tensor, x: Tensor, scheme: str, scale: Tensor) -> float:
    q = value(quantize(w * scale, preset(scheme).weight), scheme, *w.shape)
    return float((fake_quantize(x / scale, preset(scheme).act).double() @ q.t() - x.double() @ w.double().t()).norm())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_error_is_that_of_the_rounded_product(scheme: str) -> None:
    """Against float64; errors are differences of float32 sums of 150 products of up to 50 times their mean."""
    w, x = weight(), outliers()
    found = search([factor(w, x, scheme)], (150,))
    for scale, squared in ((found.scale, found.error), (torch.ones(150), found.error_plain)):
        assert float(squared.sqrt()) == pytest.approx(error(w, x, scheme, scale), rel=1e-3)
    assert bool(found.error <= found.error_plain)


def test_outliers_move_to_the_weight() -> None:
    found = search([factor(weight(), outliers(), "int8-dyn")], (150,))
    assert found.gain > 10
    assert float(found.scale[[5, 77]].min()) > 4 * float(found.scale.median())


def test_experts_have_scales_of_their_own() -> None:
    w, x = torch.stack([weight(), weight()]), [outliers(), outliers().flip(1)]
    fmt, act = preset("int8-dyn").weight, "int8"
    both = Factor(w, fmt, act, [((0,), x[0]), ((1,), x[1])], torch.arange(150))
    found = search([both], (2, 150))
    for at in range(2):
        alone = search([Factor(w[at], fmt, act, [((), x[at])], torch.arange(150))], (150,))
        torch.testing.assert_close(found.scale[at], alone.scale)
    shared = search([both], (150,))
    assert float(found.error.sum()) <= float(shared.error) <= float(shared.error_plain)


def test_an_expert_that_nothing_reaches_is_left() -> None:
    w = torch.stack([weight(), weight()])
    both = Factor(w, preset("int8-dyn").weight, "int8", [((0,), outliers())], torch.arange(150))
    assert torch.equal(search([both], (2, 150)).scale[1], torch.ones(150))


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("llama", "int8-dyn"),
        ("llama", "int8-static"),
        ("gemma", "int8-dyn"),
        ("gpt2", "int8-dyn"),
        ("mixtral", "int8-dyn"),
    ],
    ids=lambda each: each,
)
def test_models_with_outlier_channels(name: str, scheme: str) -> None:
    """At most half of the error power is left."""
    model, errors = model_of(name), {}
    plant_outliers(model, name)
    before = output(model, name)
    for how in ("rtn", "smooth"):
        other = copy.deepcopy(model)
        recipe = bitport.Recipe((bitport.Rule("lm_head", "skip"), bitport.Rule("*", scheme, ("linear", "experts"))))
        data = [batch_of(name, 4)] if uses_data(how, recipe) else None
        bitport.quantize_(other, recipe, algorithm=how, calibrate=data)
        errors[how] = sqnr(before, output(other, name))
    assert errors["smooth"] > errors["rtn"] + 3


def test_schemes_that_do_not_round_the_input_are_told_so() -> None:
    model = model_of("llama")
    report = bitport.quantize_(model, "int4-g32", algorithm=(Smooth(steps=2),), calibrate=[batch_of("llama")])
    assert {layer.algorithm for layer in report.quantized} == {"smooth"}
    assert all("does not round the input" in layer.note for layer in report.quantized)


class Sharing(nn.Module):
    """Two blocks share one layer, whose inputs are twenty times as large in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(32), "up": nn.Linear(32, 64), "down": nn.Linear(64, 32)})
            for _ in range(2)
        )
        for block in self.layers:
            block.forward = types.MethodType(Sharing.block, block)
        self.layers[1]["up"] = self.layers[0]["up"]
        with torch.no_grad():
            self.layers[1]["norm"].weight.mul_(20)

    def block(self: Any, x: Tensor) -> Tensor:
        return x + self["down"](self["up"](self["norm"](x)).relu())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = block(x)
        return x


def test_the_static_scale_of_a_layer_of_two_blocks_takes_in_both() -> None:
    """Neither block may change its input, so the scale is that of the float model."""
    torch.manual_seed(0)
    model, batches, largest = Sharing(), [torch.randn(50, 32)], []
    seen = model.layers[0]["up"].register_forward_pre_hook(lambda _, args: largest.append(args[0].abs().max()))
    with torch.no_grad():
        model(batches[0])
    seen.remove()
    assert float(largest[1]) > 10 * float(largest[0])
    bitport.quantize_(model, "fp8-static", algorithm="smooth", calibrate=batches)
    assert model.layers[0]["up"].weight.act_scale.item() == (largest[1] / 448).item()


def test_the_static_scale_of_a_changed_layer_is_that_of_its_new_inputs() -> None:
    """The first norm takes the outliers out of what it passes on; float8 has numbers up to 448."""
    torch.manual_seed(0)
    model, x = Sharing(), torch.randn(50, 32)
    model.layers[1]["up"] = nn.Linear(32, 64)
    norm, up = model.layers[0]["norm"], model.layers[0]["up"]
    with torch.no_grad():
        norm.weight[5] *= 50
        before = norm(x).abs().max()
        bitport.quantize_(model, "fp8-static", algorithm="smooth", calibrate=[x])
        after = norm(x).abs().max()
    assert after < before / 2
    assert up.weight.act_scale.item() == (after / 448).item()
