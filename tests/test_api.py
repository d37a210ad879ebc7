"""The top-level functions on whole models: quantize_, dequantize_, explain."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitport
from bitport.checkpoint import plan_files, quantize_files
from bitport.errors import ArgumentError, DeviceError, RecipeError, SchemeError
from bitport.integrations.huggingface import cast_parameters, load_model
from bitport.nn import QuantizedLinear, find_targets, swap_linears_
from bitport.numerics import sqnr
from bitport.ops import OPS
from bitport.report.text import size
from bitport.schemes import PRESETS, Choice, preset
from bitport.stream import Stream
from bitport.tensor import QTensor
from bitport.train import learn_scales_, prepare_
from tests.scripts import printed


class Everything(nn.Module):
    """One module of each kind that can be quantized, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.up = nn.Linear(64, 96)
        self.conv = nn.Conv1d(64, 32, 3, padding=1)
        self.image = nn.Conv2d(1, 8, 3)
        self.experts = nn.Parameter(torch.randn(3, 48, 64) * 0.1)
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> list[Tensor]:
        x = self.embed(ids)
        y = self.attention(x, x, x, need_weights=False)[0]
        ends = torch.tensor([1, 3, y[0].shape[0]], dtype=torch.int32, device=ids.device)
        experts = F.grouped_mm(y[0], self.experts.transpose(1, 2), offs=ends)
        return [self.head(y), self.up(y), self.conv(y.transpose(1, 2)), experts, self.image(y[:, None])]


ALL = {"embed": "int8", "head": "int8", "*": "int8"}
IDS = torch.arange(14).reshape(2, 7)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def test_every_kind_of_layer_is_quantized_and_runs() -> None:
    model = Everything()
    before = model(IDS)
    report = bitport.quantize_(model, ALL)
    assert {layer.name for layer in report.quantized} == {
        "experts",
        "embed.weight",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "up.weight",
        "conv.weight",
        "image.weight",
        "head.weight",
    }
    for now, then in zip(model(IDS), before, strict=True):
        assert float(sqnr(then, now)) > 30  # 8 bits at 6.02 dB each, less crest factor and a chain of four layers


@pytest.mark.parametrize("scheme", [name for name in PRESETS if not PRESETS[name].static])
def test_every_preset_on_every_kind(scheme: str) -> None:
    model = Everything()
    report = bitport.quantize_(model, {"*": scheme})
    left = {layer.name: layer.reason for layer in report.skipped}
    assert set(left) == ({"conv.weight", "image.weight"} if preset(scheme).act else set())
    assert all("convolutions are weight-only" in reason for reason in left.values())
    for y in model(IDS):
        assert y.isfinite().all()


def test_by_name_alone_what_feeds_a_product_is_quantized() -> None:
    model = Everything()
    report = bitport.quantize_(model, "int8")
    assert {layer.name for layer in report.quantized} == {
        "experts",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "up.weight",
    }
    assert {layer.name: layer.reason for layer in report.skipped} == {
        "embed.weight": "a scheme given by name leaves embeddings as they are; a rule for them quantizes them",
        "conv.weight": "a scheme given by name leaves convolutions as they are; a rule for them quantizes them",
        "image.weight": "a scheme given by name leaves convolutions as they are; a rule for them quantizes them",
        "head.weight": "tied to embed.weight, which stays as it is; a rule for that one quantizes both",
    }


TAKE_RECIPES = (bitport.plan, bitport.quantize_, quantize_files, plan_files, Stream, prepare_, swap_linears_)
TAKE_DEVICES = (bitport.quantize_, bitport.load, load_model, QuantizedLinear)


@pytest.mark.parametrize(
    ("takes", "name", "kinds"),
    [(each, "recipe", {"RecipeLike"}) for each in TAKE_RECIPES]
    + [(each, "device", {"torch.device", "str", "int", "None"}) for each in TAKE_DEVICES],
    ids=lambda each: getattr(each, "__name__", "") if callable(each) else "",
)
def test_type_checkers_let_through_what_is_taken(takes: Callable[..., Any], name: str, kinds: set[str]) -> None:
    """The package is typed, so a form of recipe that a signature omits is a type error for users."""
    assert set(inspect.signature(takes).parameters[name].annotation.split(" | ")) == kinds


# -- tied weights ----------------------------------------------------------------------------------------------------


def test_tied_weights_stay_one_parameter_and_the_model_shrinks() -> None:
    model = Everything()
    report = bitport.quantize_(model, ALL)
    assert model.embed.weight is model.head.weight
    assert isinstance(model.head.weight, bitport.QTensor)
    assert report.bytes_after == sum(param.nbytes for param in model.parameters())
    floats = sum(param.nbytes for param in model.parameters() if not isinstance(param, bitport.QTensor))
    assert report.bytes_after - floats < 0.27 * (report.bytes_before - floats)
    restored = bitport.dequantize_(model)
    assert restored is model
    assert model.embed.weight is model.head.weight


def test_a_module_used_twice() -> None:
    shared = nn.Linear(64, 64)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    report = bitport.quantize_(model, "int4-g32")
    assert model[0] is model[2]
    assert [layer.name for layer in report.quantized] == ["0.weight", "2.weight"]
    assert report.bytes_after == model[0].weight.nbytes + model[0].bias.nbytes


def test_one_parameter_under_two_names_of_a_module() -> None:
    model = nn.Module()
    model.expert_a = model.expert_b = nn.Parameter(torch.randn(2, 32, 32))
    bitport.quantize_(model, "int8")
    assert isinstance(model.expert_a, bitport.QTensor)
    assert model.expert_a is model.expert_b
    cast_parameters(model, torch.bfloat16)
    assert model.expert_a is model.expert_b
    bitport.dequantize_(model)
    assert not isinstance(model.expert_a, bitport.QTensor)
    assert model.expert_a is model.expert_b


# -- the report ------------------------------------------------------------------------------------------------------


def test_report() -> None:
    model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 8))
    before = weights(model)
    report = bitport.quantize_(model, [("1", "skip"), ("*", "int4-g32")])
    first, second = report.layers
    assert (first.name, first.scheme, first.reason) == ("0.weight", "int4-g32", "rule '*'")
    assert (first.bytes_before, first.bytes_after) == (64 * 32 * 4, 32 * 32 + 32 * 2 * (4 + 1))
    assert first.sqnr == pytest.approx(float(sqnr(before["0.weight"], model[0].weight.dequantize())))
    assert second == dataclasses.replace(second, scheme=None, reason="rule '1' says skip", sqnr=None)
    assert report.bytes_before - report.bytes_after == first.bytes_before - first.bytes_after
    assert json.loads(report.to_json())["layers"][0]["name"] == "0.weight"


def test_what_a_notebook_shows_fits_a_screen(tmp_path: Path) -> None:
    """A cell ending in quantize_ must not print every weight of a large model, nor one ending in save every part."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(99)))
    report = bitport.quantize_(model, "int8")
    assert repr(report).startswith(report.summary())
    assert len(repr(report).splitlines()) == 5
    assert all(layer.name in str(report) for layer in report.layers)
    for shown in (bitport.explain(model), bitport.Recipe.of("int8").resolve(find_targets(model))):
        assert repr(shown) == str(shown)
    assert len(repr(bitport.save(model, tmp_path))) < 80


def test_parts_are_found_without_importing_them_by_name() -> None:
    """Those that ``import bitport`` leaves for later are listed, and imported where they are first used."""
    known = "print('train' in dir(bp), 'bitport.train' in sys.modules)"
    assert printed(f"import bitport as bp, sys; {known}") == "True False\n"
    assert printed("import bitport as bp; print(bp.train.prepare_.__name__)") == "prepare_\n"
    with pytest.raises(AttributeError, match="no attribute 'quantise_'"):
        bitport.quantise_  # noqa: B018


def test_measuring_can_be_left_out() -> None:
    report = bitport.quantize_(nn.Linear(64, 32), "int8", measure=False)
    assert report.layers[0].sqnr is None


def test_a_second_time_says_so_and_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8))
    bitport.quantize_(model, {"0": "int4-g32"})
    before = model[0].weight.clone()
    with pytest.warns(UserWarning, match=r"^1 weights are .* 0\.weight \(int4-g32, not int8\)\. dequantize_\(model\)"):
        report = bitport.quantize_(model, "int8")
    assert [(layer.name, layer.scheme) for layer in report.quantized] == [
        ("0.weight", "int4-g32"),
        ("1.weight", "int8"),
    ]
    assert report.layers[0].reason == "is int4-g32 already, not int8"
    assert torch.equal(model[0].weight, before)


def test_a_plan_tells_what_would_be_done_and_does_it() -> None:
    """Also for a model that has no numbers, or is quantized in part."""
    planned, straight = Everything(), Everything()
    before = weights(planned)
    plan = bitport.plan(planned, ALL)
    report = bitport.quantize_(straight, ALL)
    assert [(each.name, str(each.scheme)) for each in plan.choices] == [(a.name, a.scheme) for a in report.layers]
    assert all(torch.equal(before[name], value) for name, value in weights(planned).items())
    with torch.device("meta"):
        assert bitport.plan(Everything(), ALL) == plan
    done = bitport.quantize_(planned, plan)
    assert [layer.scheme for layer in done.layers] == [layer.scheme for layer in report.layers]
    assert planned.head.weight is planned.embed.weight
    assert bitport.plan(planned, "int4")["up.weight"] == Choice("up.weight", None, "is int8 already")


@pytest.mark.parametrize("recipe", [{"0": "int4-g32", "1": "int8"}, {"0": "skip", "1": "int8"}], ids=["same", "skip"])
def test_the_same_again_is_no_reason_to_warn(recipe: dict[str, str]) -> None:
    """As after a run that was interrupted; the report lists what is quantized."""
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8))
    bitport.quantize_(model, {"0": "int4-g32"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = bitport.quantize_(model, recipe)
    assert [layer.scheme for layer in report.layers] == ["int4-g32", "int8"]
    assert (report.layers[0].reason, report.layers[0].sqnr) == ("is int4-g32 already", None)
    assert str(report).endswith(
        f"2 weights quantized, 0 left; {size(report.bytes_before)} -> {size(report.bytes_after)}"
    )


@pytest.mark.parametrize("algorithm", ["rtn", "clip", "hqq"])
def test_data_that_would_not_be_looked_at(algorithm: str) -> None:
    """Batches were ignored without a word."""
    model, batches = nn.Linear(64, 32), [torch.randn(4, 64)]
    for do in (bitport.quantize_, prepare_):
        with pytest.raises(
            ArgumentError, match=rf"calibrate would have no effect: {algorithm} does not look at inputs"
        ):
            do(model, "int4", algorithm=algorithm, calibrate=batches)
    assert type(model.weight) is nn.Parameter
    bitport.quantize_(model, "int8-static", algorithm=algorithm, calibrate=batches)


# -- sizes and places ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["int4", "mxfp4", "nvfp4", "fp8-block", "int4-b8x16-sym", "nf4"])
@pytest.mark.parametrize("size", [(33, 100), (7, 31), (1, 1)], ids=str)
def test_sizes_that_no_group_divides(scheme: str, size: tuple[int, int]) -> None:
    n, k = size
    model = nn.Linear(k, n)
    report = bitport.quantize_(model, scheme)
    assert [layer.scheme for layer in report.layers] == [scheme]
    dense = model.weight.dequantize()
    assert dense.shape == (n, k)
    if not preset(scheme).act:
        x = torch.randn(3, k)
        torch.testing.assert_close(model(x), F.linear(x, dense, model.bias), rtol=1e-5, atol=1e-5)


def test_a_model_without_data() -> None:
    with torch.device("meta"):
        model = Everything()
    report = bitport.quantize_(model, ALL)
    assert all(param.device.type == "meta" for param in model.parameters())
    assert {layer.sqnr for layer in report.layers} == {None}
    real = Everything()
    assert bitport.quantize_(real, ALL).bytes_after == report.bytes_after
    assert [y.shape for y in model(IDS.to("meta"))[:3]] == [y.shape for y in real(IDS)[:3]]


def test_weights_are_quantized_on_the_device_asked_for() -> None:
    model = nn.Sequential(nn.Linear(64, 32))
    report = bitport.quantize_(model, "int8", device="meta")
    assert model[0].weight.device.type == model[0].weight.qdata.device.type == "meta"
    assert report.quantized


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_float_dtype(dtype: torch.dtype) -> None:
    model = nn.Linear(64, 32).to(dtype)
    x = torch.randn(3, 64).to(dtype)
    before = model(x)
    bitport.quantize_(model, "int8")
    assert model.weight.dtype == model(x).dtype == dtype
    assert float(sqnr(before, model(x))) > 35


def test_the_numbers_do_not_depend_on_what_else_is_in_the_model() -> None:
    layer = nn.Linear(64, 32)
    alone, inside = copy.deepcopy(layer), nn.Sequential(nn.Linear(8, 64), copy.deepcopy(layer))
    bitport.quantize_(alone, "int4-g32")
    bitport.quantize_(inside, "int4-g32")
    assert torch.equal(alone.weight, inside[1].weight)


# -- calibration -----------------------------------------------------------------------------------------------------


def test_static_scales() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
    x = torch.randn(16, 64)
    inner = model[1](model[0](x)).detach()
    before = model(x)
    bitport.quantize_(model, "int8-static", calibrate=[x[:8], x[8:]])
    for layer, seen in ((model[0], x), (model[2], inner)):
        assert 0.9 < float(layer.weight.act_scale * 127 / seen.abs().amax()) <= 1
    assert float(sqnr(before, model(x))) > 25


@pytest.mark.parametrize(
    ("calibrate", "message"),
    [
        pytest.param(None, r"2 weights \(0.weight, ...\) have a static input scale.*give calibrate=batches", id="none"),
        pytest.param([], "calibration never reached 0.weight, 1.weight", id="empty"),
        pytest.param([torch.full((1, 64), float("inf"))], "NaN or infinity at the input of 0", id="infinite"),
    ],
)
def test_static_scales_that_cannot_be_measured(calibrate: Any, message: str) -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8))
    with pytest.raises(ArgumentError, match=message):
        bitport.quantize_(model, "int8-static", calibrate=calibrate)
    assert not isinstance(model[0].weight, bitport.QTensor)


# -- errors leave the model as it was --------------------------------------------------------------------------------


@pytest.fixture
def refusing_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that has no 8-bit floats."""
    from bitport.ops import device

    real = device._try

    def attempt(scheme: bitport.Scheme, where: torch.device) -> None:
        if scheme.weight.dtype.startswith("float8"):
            raise RuntimeError("no float8 here")
        real(scheme, where)

    monkeypatch.setattr(device, "_try", attempt)


FAILURES: dict[str, tuple[Callable[[nn.Module], Any], type[Exception], str]] = {
    "unknown-scheme": (lambda m: bitport.quantize_(m, "int99"), SchemeError, "unknown scheme 'int99'"),
    "rule-that-fits-nothing": (
        lambda m: bitport.quantize_(m, [("up", "int8"), ("nope", "int4")]),
        RecipeError,
        "rule 'nope'",
    ),
    "tied-in-conflict": (
        lambda m: bitport.quantize_(m, {"embed": "int8", "head": "int4", "*": "int8"}),
        RecipeError,
        "one tied weight",
    ),
    "no-recipe": (lambda m: bitport.quantize_(m, None), RecipeError, "cannot read a recipe"),
    "not-calibrated": (
        lambda m: bitport.quantize_(m, {"up": "int8-static", "*": "int8"}),
        ArgumentError,
        "give calibrate=batches",
    ),
    "device": (
        lambda m: bitport.quantize_(m, {"up": "int8", "*": "fp8-wo"}),
        DeviceError,
        "cpu cannot hold fp8-wo: no float8 here",
    ),
    "device-that-torch-lacks": (
        lambda m: bitport.quantize_(m, "int8", device="privateuseone"),
        DeviceError,
        "no device privateuseone here: No module named",
    ),
    "float64": (lambda m: bitport.quantize_(m.double(), "int8"), ArgumentError, "is torch.float64; cast the model"),
}


@pytest.mark.usefixtures("refusing_device")
@pytest.mark.parametrize("failure", FAILURES)
def test_an_error_before_the_first_weight_changes_nothing(failure: str) -> None:
    call, error, message = FAILURES[failure]
    model = Everything()
    before = weights(model)
    with pytest.raises(error, match=message):
        call(model)
    after = dict(model.named_parameters())
    assert set(after) == set(before)
    for name, param in after.items():
        assert type(param) is nn.Parameter
        assert torch.equal(param.float(), before[name])
    assert model.embed.weight is model.head.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("at", [0, 123, -1])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_bad_weights_are_named(bad: float, at: int, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(33, 9)).to(dtype)
    model[1].weight.data.view(-1)[at] = bad
    with pytest.raises(ArgumentError, match=r"1\.weight holds NaN or infinity"):
        bitport.quantize_(model, "int8")


# -- back again ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, torch.float16], ids=["own", "float16"])
def test_dequantize(dtype: torch.dtype | None) -> None:
    model = Everything()
    bitport.quantize_(model, ALL)
    values = {name: p.dequantize(dtype) for name, p in model.named_parameters() if isinstance(p, bitport.QTensor)}
    bitport.dequantize_(model, dtype)
    for name, param in model.named_parameters():
        assert type(param) is nn.Parameter
        if name in values:
            assert torch.equal(param, values[name])
            assert param.dtype == (dtype or torch.float32)
    assert model.embed.weight is model.head.weight


def test_what_a_scheme_holds_exactly_survives_the_round_trip() -> None:
    """Dequantizing and quantizing again gives the same bits."""
    model = nn.Linear(64, 32)
    bitport.quantize_(model, "int8")
    first = model.weight.clone()
    bitport.dequantize_(model)
    assert bitport.quantize_(model, "int8").layers[0].sqnr > 100
    assert torch.equal(model.weight.qdata, first.qdata)


def test_a_model_that_is_used_keeps_its_hooks_and_mode() -> None:
    model = nn.Sequential(nn.Linear(64, 32)).eval()
    seen = []
    model[0].register_forward_hook(lambda *a: seen.append(1))
    bitport.quantize_(model, "int8")
    model(torch.randn(1, 64))
    assert seen == [1]
    assert not model.training


def test_the_public_names() -> None:
    """Everything in __all__ exists, and the ops are at torch.ops.bitport."""
    for name in bitport.__all__:
        assert getattr(bitport, name) is not None
    for op in OPS:
        assert hasattr(torch.ops.bitport, op)


def test_a_nan_in_a_later_layer_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    with torch.no_grad():
        model[1].weight[3, 4] = float("nan")
    with pytest.raises(ArgumentError, match=r"1\.weight holds NaN"):
        bitport.quantize_(model, "int8")
    assert not isinstance(model[0].weight, bitport.QTensor)


def test_a_table_indexed_by_a_tensor_is_looked_up() -> None:
    """Some position embeddings use weight[ids] instead of F.embedding."""
    table = nn.Embedding(50, 32)
    bitport.quantize_(nn.ModuleDict({"table": table}), {"table": "int8"})
    ids = torch.tensor([[3, 7], [0, 49]])
    assert torch.equal(table.weight[ids], table(ids))
    with pytest.raises(ArgumentError):
        table.weight.t()[ids]


def test_names_of_a_compiled_model_are_those_of_the_model() -> None:
    """They began with _orig_mod, so that recipes and reports did not fit those of the model or its checkpoint."""
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8))
    compiled = torch.compile(model)
    x = torch.randn(3, 64)
    assert [choice.name for choice in bitport.plan(compiled, "int4-g32").choices] == ["0.weight", "1.weight"]
    recipe = bitport.mixed(compiled, ("int4-g32", "int8"), bits=9.0, calibrate=[x])
    report = bitport.quantize_(compiled, recipe)
    assert [layer.name for layer in report.layers] == ["0.weight", "1.weight"]
    assert isinstance(model[0].weight, QTensor)
    assert [layer.name for layer in bitport.explain(compiled).layers] == ["0.weight", "1.weight"]
    assert torch.equal(compiled(x), model(x))
    assert learn_scales_(compiled).quantized
