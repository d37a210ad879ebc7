"""Algorithms through quantize_: whole models, their reports, and the messages where an algorithm cannot help."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitport
from bitport.algorithms import ALGORITHMS, GPTQ, HQQ
from bitport.algorithms.mixed import costs
from bitport.algorithms.solving import uses_data
from bitport.calibrate.inputs import Inputs
from bitport.errors import ArgumentError
from bitport.numerics import Format, quantize, sqnr


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(x)))


class Model(nn.Module):
    """Blocks, experts of which one is never used, a convolution, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 64)
        self.mix = nn.Linear(64, 64)
        self.layers = nn.Sequential(Layer(), Layer())
        self.conv = nn.Conv1d(64, 64, 3, padding=1)
        self.experts = nn.Parameter(torch.randn(3, 64, 64) * 0.1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.layers(self.mix(self.embed(ids)))
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        first, rest = x[:, :1], x[:, 1:]
        x = torch.cat([F.linear(first, self.experts[0]), F.linear(rest, self.experts[2])], 1)
        return F.linear(x, self.embed.weight)


TOKENS = torch.randint(0, 40, (24, 30), generator=torch.Generator().manual_seed(0))
BATCHES, HELD_OUT = list(TOKENS[:16].split(4)), TOKENS[16:]


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(1)
    model = Model()
    with torch.no_grad():  # correlated inputs for a layer, as in a trained model
        model.mix.weight.copy_(torch.randn(64, 8) @ torch.randn(8, 64) * 0.05)
    return model


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("scheme", ["int3-g32", "nvfp4", "int4-int8"])
def test_every_algorithm_gives_ordinary_weights(model: Model, name: str, scheme: str) -> None:
    plain, other = copy.deepcopy(model), copy.deepcopy(model)
    bitport.quantize_(plain, scheme)
    data = BATCHES if uses_data(name, scheme) else None
    report = bitport.quantize_(other, scheme, algorithm=name, calibrate=data)
    for ours, theirs in zip(other.parameters(), plain.parameters(), strict=True):
        assert type(ours) is type(theirs)
        assert ours.nbytes == theirs.nbytes
        assert getattr(ours, "scheme", None) == getattr(theirs, "scheme", None)
    assert {layer.algorithm for layer in report.quantized} == {name}
    assert other(HELD_OUT).isfinite().all()


def test_gptq_keeps_the_outputs(model: Model) -> None:
    exact, errors = model(HELD_OUT), {}
    for name in ("rtn", "gptq"):
        other = copy.deepcopy(model)
        report = bitport.quantize_(other, "int3-g32", algorithm=name, calibrate=BATCHES if name == "gptq" else None)
        errors[name] = float(sqnr(exact, other(HELD_OUT)))
    assert errors["gptq"] > errors["rtn"] + 1
    for layer in report.quantized:
        assert layer.output_sqnr is not None
        assert layer.output_sqnr_rtn is not None
        assert layer.output_sqnr > layer.output_sqnr_rtn
    assert "gptq" in str(report)
    assert json.loads(report.to_json())["layers"][0].keys() >= {"algorithm", "output_sqnr", "output_sqnr_rtn"}


def test_the_error_of_the_output_is_what_it_says(model: Model) -> None:
    """Checked for one layer, against its outputs in float64."""
    other, kept = copy.deepcopy(model), []
    model.mix.register_forward_pre_hook(lambda module, args: kept.append(args[0].detach()))
    report = bitport.quantize_(other, {"mix": "int3-g32"}, algorithm="gptq", calibrate=BATCHES)
    for batch in BATCHES:
        model(batch)
    x, w = torch.cat([rows.flatten(0, -2) for rows in kept]).double(), model.mix.weight.double()
    q = other.mix.weight.dequantize(torch.float32).double()
    expected = float(sqnr(x @ w.t(), x @ q.t()))
    assert next(layer.output_sqnr for layer in report.quantized) == pytest.approx(expected, abs=0.01)


def test_what_an_algorithm_cannot_treat_is_told(model: Model) -> None:
    report = bitport.quantize_(copy.deepcopy(model), {"*": "int4-g32"}, algorithm="gptq", calibrate=BATCHES)
    told = {layer.name: (layer.algorithm, layer.note) for layer in report.layers}
    assert told["embed.weight"][0] == told["conv.weight"][0] == "rtn"
    assert "gptq is for the weights of products" in told["conv.weight"][1]
    assert told["experts"] == (
        "gptq",
        "1 of 3 matrices saw no input in calibration: rounded to nearest; "
        "calibrated on only 16 rows of 64 numbers: on other inputs its output is worse than shown here",
    )
    report = bitport.quantize_(copy.deepcopy(model), "mxfp4", algorithm="hqq")
    assert all("powers of two" in layer.note for layer in report.quantized)


@pytest.mark.parametrize(("name", "solver"), [("awq", "clip"), ("awq+hqq", "hqq"), ("awq+gptq", "rtn")])
def test_a_transform_leaves_tables_and_convolutions_to_what_follows(name: str, solver: str) -> None:
    """They were rounded to nearest whatever followed, since "32 of 32 matrices saw no input in calibration"."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.conv, self.head = nn.Embedding(96, 64), nn.Conv1d(64, 32, 3), nn.Linear(32, 16)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.conv(self.embed(ids).mT).mT)

    torch.manual_seed(0)
    after = Both()
    alone = copy.deepcopy(after)
    ids = torch.arange(96).reshape(4, 24)
    report = bitport.quantize_(after, {"*": "int4-g32"}, algorithm=name, calibrate=[ids])
    bitport.quantize_(alone, {"*": "int4-g32"}, algorithm=solver)
    for layer, module in zip(report.layers, ("embed", "conv"), strict=False):
        assert (layer.name, layer.algorithm) == (f"{module}.weight", solver)
        assert "calibration" not in layer.note
        assert torch.equal(getattr(after, module).weight, getattr(alone, module).weight)


@pytest.mark.parametrize("algorithm", ["gptq", "signround", "awq+gptq"])
@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU])
def test_recurrent_layers(make: Callable[..., nn.RNNBase], algorithm: str) -> None:
    """By their inputs and states. Rounded for these, their outputs are nearer to the float ones than by rounding to
    nearest, although the states drift."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.layer = nn.Linear(64, 64), make(64, 64, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.up(x).relu())[0]

    torch.manual_seed(0)
    model, batches = Net(), [torch.randn(16, 12, 64) for _ in range(4)]
    x, lost = batches.pop(), {}
    for name in ("rtn", algorithm):
        other = copy.deepcopy(model)
        given = {} if name == "rtn" else {"calibrate": batches}
        report = bitport.quantize_(other, {"*": "int3-g32"}, algorithm=name, **given)
        assert [layer.algorithm for layer in report.quantized] == [name] * 3
        with torch.no_grad():
            lost[name] = float((other(x) - model(x)).square().mean())
    assert all(layer.output_sqnr > layer.output_sqnr_rtn for layer in report.quantized)
    assert lost[algorithm] < lost["rtn"]


def test_a_weight_whose_input_is_never_seen(model: Model) -> None:
    other = nn.ModuleDict({"used": nn.Linear(64, 64), "unused": nn.Linear(64, 64)})
    before = other["unused"].weight.detach().clone()
    other.forward = lambda x: other["used"](x)  # type: ignore[method-assign]
    report = bitport.quantize_(other, "int4-g32", algorithm="gptq", calibrate=[torch.randn(9, 64)])
    assert [layer.algorithm for layer in report.layers] == ["gptq", "rtn"]
    assert "showed no input of it" in report.layers[1].note
    assert torch.equal(other["unused"].weight.qdata, bitport.quantize_tensor(before, "int4-g32").qdata)


def test_attention_is_calibrated() -> None:
    """Both of its projections are inside one torch function. Here it is a block itself, and the queries are the
    keys."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.MultiheadAttention(64, 4, batch_first=True) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x, x, x)[0]
            return x

    torch.manual_seed(0)
    other, mix = Attention(), torch.randn(64, 64) @ torch.randn(64, 64) * 0.02
    batches = [torch.randn(2, 30, 64) @ mix for _ in range(4)]
    report = bitport.quantize_(other, "int3-g32", algorithm="gptq", calibrate=batches)
    assert {layer.algorithm for layer in report.quantized} == {"gptq"}
    assert all(layer.output_sqnr > layer.output_sqnr_rtn for layer in report.quantized)  # type: ignore[operator]


def test_an_encoder_with_padding_is_calibrated() -> None:
    """torch itself switches to nested tensors while the weights are floats."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 32, batch_first=True), 2)

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            out: Tensor = self.encoder(x, src_key_padding_mask=padding)
            return out

    torch.manual_seed(0)
    other = Encoder()
    batches = [(torch.randn(4, 30, 32), torch.arange(30).expand(4, -1) >= torch.tensor([[30], [25], [12], [7]]))]
    options = costs(other, ("int2-g32", "int8"), calibrate=batches).options
    assert all(0 < large.error < small.error / 100 for small, large in options)  # both computed on the same path
    report = bitport.quantize_(other, "int4-g32", algorithm="gptq", calibrate=batches)
    assert all(layer.output_sqnr > layer.output_sqnr_rtn for layer in report.quantized)  # type: ignore[operator]


@pytest.mark.parametrize("how", ["gptq", "awq", "signround"])
def test_layers_that_give_nothing_lose_nothing(how: str) -> None:
    """With zero outputs there is no error, and no scale improves anything."""
    other = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
    with torch.no_grad():
        other[0].weight.zero_()
        other[0].bias.zero_()
    report = bitport.quantize_(other, "int4-g32", algorithm=how, calibrate=[torch.randn(9, 32)])
    for layer in report.layers:
        assert layer.output_sqnr == layer.output_sqnr_rtn == float("inf")
        assert "its input is multiplied" not in layer.note


class Counted(nn.Module):
    """Layers that count how often they run; with ``again``, a second list holds some of them too."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.calls = 0
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        for layer in self.layers:
            layer.register_forward_pre_hook(self.count)
        if again:
            self.again = nn.Sequential(*self.layers[1:])

    def count(self, *_: object) -> None:
        self.calls += 1

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("algorithm", ["gptq", "awq"])
def test_a_layer_in_two_lists_is_one(algorithm: str) -> None:
    twice, once = Counted(again=True), Counted(again=False)
    once.layers.load_state_dict(twice.layers.state_dict())
    for each in (once, twice):
        batches = [torch.randn(40, 64, generator=torch.Generator().manual_seed(at)) for at in range(2)]
        bitport.quantize_(each, "int3", algorithm=algorithm, calibrate=batches)
    for name, wanted in once.state_dict().items():
        assert torch.equal(twice.state_dict()[name], wanted)
    assert twice.again[0].up.weight is twice.layers[1].up.weight
    assert twice.calls == once.calls


def test_settings_and_a_function_as_data(model: Model) -> None:
    """The same batches give the same bits as a list and as a function that runs the model."""
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    algorithm = GPTQ(damping=0.1, sort=False, clip=False)
    bitport.quantize_(first, "int4-g32", algorithm=algorithm, calibrate=BATCHES)
    bitport.quantize_(
        second, "int4-g32", algorithm=algorithm, calibrate=lambda model: [model(batch) for batch in BATCHES]
    )
    for ours, theirs in zip(first.layers.modules(), second.layers.modules(), strict=True):
        if isinstance(ours, nn.Linear):
            assert torch.equal(ours.weight.qdata, theirs.weight.qdata)


def test_static_scales_beside_an_algorithm(model: Model) -> None:
    other = copy.deepcopy(model)
    bitport.quantize_(other, {"layers.*": "int8-static"}, algorithm=HQQ(steps=2), calibrate=iter(BATCHES))
    assert other.layers[0].up.weight.act_scale is not None
    bitport.quantize_(other, {"mix": "int8-static"}, algorithm="gptq", calibrate=iter(BATCHES))
    assert other.mix.weight.act_scale is not None


def test_a_model_of_shapes_needs_no_data() -> None:
    report = bitport.quantize_(Model().to("meta"), "int4-g32", algorithm="gptq")
    assert {layer.algorithm for layer in report.quantized} == {"gptq"}


def test_static_scales_of_a_model_of_shapes_are_shapes(model: Model) -> None:
    """As many as for a model with data; an embedding that is no head has none."""
    report = bitport.quantize_(Model().to("meta"), "int8-static")
    assert report.bytes_after == bitport.quantize_(copy.deepcopy(model), "int8-static", calibrate=BATCHES).bytes_after
    shapes = nn.Sequential(nn.Embedding(40, 64), nn.Linear(64, 40)).to("meta")
    bitport.quantize_(shapes, {"*": "int8-static"})
    assert (shapes[0].weight.act_scale is None, tuple(shapes[1].weight.act_scale.shape)) == (True, (1, 1))


@pytest.mark.parametrize(("scheme", "by"), [("int4-g32", "gptq"), ("int4-g32", "awq"), ("int8-static", "rtn")])
def test_a_model_of_which_a_part_is_shapes(scheme: str, by: str) -> None:
    """It cannot run, and the weights that have data must not be rounded as if no calibration had been requested."""
    other = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32, device="meta"))
    with pytest.raises(ArgumentError, match=r"1 of 2 weights have no data \(1.weight\), so the model cannot be run"):
        bitport.quantize_(other, scheme, algorithm=by, calibrate=[torch.randn(9, 32)])
    assert not isinstance(other[0].weight, bitport.QTensor)
    bitport.quantize_(other, "int4-g32")


class Unfinished:
    name = "unfinished"

    def solve(self) -> None: ...

    def __repr__(self) -> str:
        return "Unfinished here"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"algorithm": "gptq"}, "gptq looks at the inputs of layers; give calibrate", id="no data"),
        pytest.param({"algorithm": "gptq", "calibrate": []}, "holds no batch", id="empty data"),
        pytest.param({"algorithm": "magic"}, "unknown algorithm 'magic'; known: rtn, clip, hqq, gptq", id="unknown"),
        pytest.param(
            {"algorithm": "awq,gptq"}, r"unknown algorithm 'awq,gptq'.* joined by \+, as in awq\+gptq", id="comma"
        ),
        pytest.param(
            {"algorithm": Unfinished()}, "Unfinished here, which lacks needs_inputs, refuses$", id="unfinished"
        ),
    ],
)
def test_problems_are_told_before_anything_is_changed(model: Model, options: dict[str, object], message: str) -> None:
    other = copy.deepcopy(model)
    with pytest.raises(ArgumentError, match=message):
        bitport.quantize_(other, "int4-g32", **options)  # type: ignore[arg-type]
    assert not any(isinstance(param, bitport.QTensor) for param in other.parameters())


@dataclasses.dataclass(frozen=True)
class Own:
    """An algorithm from outside, which solves by a function."""

    by: Callable[[Tensor, Format], Any]
    name: ClassVar[str] = "own"
    needs_inputs: ClassVar[bool] = False

    def refuses(self, fmt: Format, kind: str) -> str | None:
        return None

    def solve(self, w: Tensor, fmt: Format, inputs: Inputs | None = None) -> Any:
        return self.by(w, fmt)


def test_an_algorithm_from_outside(model: Model) -> None:
    report = bitport.quantize_(copy.deepcopy(model), "int4-g32", algorithm=Own(quantize))
    assert {layer.algorithm for layer in report.layers if layer.scheme} == {"own"}


@pytest.mark.parametrize(
    ("by", "said"),
    [
        (lambda w, fmt: None, "the algorithm own has returned NoneType, not a bitport.numerics.Quantized"),
        (lambda w, fmt: tuple(quantize(w, fmt)), "has returned tuple"),
        (lambda w, fmt: quantize(w.zero_(), fmt), "the algorithm own has written into the weight: clone it"),
    ],
    ids=["nothing", "a tuple", "written"],
)
def test_an_algorithm_in_the_making(by: Callable[[Tensor, Format], Any], said: str, model: Model) -> None:
    """One that wrote into the weight was reported with the error of what it had written: none at all."""
    with pytest.raises(ArgumentError, match=said):
        bitport.quantize_(copy.deepcopy(model), "int4-g32", algorithm=Own(by))


class Forgetful:
    """A transform whose model_ returns nothing."""

    name: ClassVar[str] = "forgetful"
    needs_model: ClassVar[bool] = False

    def model_(self, model: nn.Module, batches: Any) -> Any: ...

    def block_(self, block: Any) -> None: ...


def test_a_transform_in_the_making(model: Model) -> None:
    with pytest.raises(ArgumentError, match="model_ of the transform forgetful has returned NoneType, not a dict"):
        bitport.quantize_(
            copy.deepcopy(model), "int4-g32", algorithm=[Forgetful(), "rtn"], calibrate=[torch.randn(4, 64)]
        )
