"""prepare_, convert_, release_: which weights, what they become, and what is refused."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitport as bp
from bitport.errors import ArgumentError, RecipeError
from bitport.tensor import QTensor
from bitport.train import Gradients, TrainedTensor, convert_, learn_scales_, prepare_, release_


class Model(nn.Module):
    """A layer of each kind, with the head tied to the table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.conv = nn.Conv1d(64, 64, 3, padding=1)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        self.norm = nn.LayerNorm(64)
        self.up = nn.ConvTranspose1d(64, 64, 3, padding=1)
        self.recurrent = nn.GRU(64, 64, batch_first=True)
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.recurrent(x + self.mlp(x))[0]
        return self.head(self.norm(self.up(x.transpose(1, 2)).transpose(1, 2)))


EVERYTHING = [("*", "int4-g32", ("linear", "embedding", "attention", "conv", "recurrent"))]
IDS = torch.arange(24).reshape(2, 12)


def loss_of(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(IDS).flatten(0, 1), (IDS.flatten() * 7) % 50)


def test_every_kind_trains_as_what_it_becomes() -> None:
    model = Model()
    plan = prepare_(model, EVERYTHING)
    assert len(plan.quantized) == 10
    loss = loss_of(model)
    loss.backward()
    assert all(param.grad is not None for param in model.parameters())
    report = convert_(model)
    assert [layer.name for layer in report.quantized if layer.tied] == ["head.weight"]
    assert isinstance(model.embed.weight, QTensor)
    assert model.head.weight is model.embed.weight
    assert torch.allclose(loss_of(model), loss, rtol=1e-5)


def test_gradients_of_every_kind_are_those_at_the_rounded_weights() -> None:
    """A float model with the rounded numbers has the same gradients, in its own arithmetic."""
    model = Model()
    prepare_(model, EVERYTHING)
    rounded = copy.deepcopy(model)
    convert_(rounded)
    bp.dequantize_(rounded)
    rounded.requires_grad_(True)
    for each in (model, rounded):
        loss_of(each).backward()
    for (name, param), want in zip(model.named_parameters(), rounded.parameters(), strict=True):
        assert param.grad is not None
        assert want.grad is not None
        assert torch.allclose(param.grad, want.grad, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("scheme", ["int4-g32", "int8-dyn", "fp8", "mxfp8", "int4-int8", "nvfp4"])
def test_conversion_is_quantization_of_the_trained_values(scheme: str) -> None:
    model = Model()
    prepare_(model, scheme)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()
    optimizer.step()
    floats = Model()
    floats.load_state_dict(model.state_dict())
    convert_(model)
    bp.quantize_(floats, scheme)
    with torch.no_grad():
        assert torch.equal(model(IDS), floats(IDS))


def test_names_and_state_are_those_of_the_float_model() -> None:
    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    prepare_(model, EVERYTHING)
    state = model.state_dict()
    assert list(state) == list(before)
    assert all(type(value) is Tensor and torch.equal(value, before[name]) for name, value in state.items())
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    fresh = Model()
    prepare_(fresh, EVERYTHING)
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(fresh(IDS), model(IDS))
    assert isinstance(fresh.embed.weight, TrainedTensor)
    kept = model.state_dict(keep_vars=True)
    assert kept["embed.weight"] is model.embed.weight


def test_assigning_a_state_would_end_the_training_in_silence() -> None:
    model = Model()
    prepare_(model, "int8")
    with pytest.raises(ArgumentError, match=r"assign=True\) replaced weight, .*load with assign=False"):
        model.load_state_dict(model.state_dict(), assign=True)


def test_release_gives_back_the_float_model() -> None:
    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    prepare_(model, EVERYTHING)
    model.mlp[0].weight.requires_grad_(False)
    assert release_(model) is model
    assert all(type(param.data) is Tensor for param in model.parameters())
    assert model.head.weight is model.embed.weight
    assert not model.mlp[0].weight.requires_grad
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.load_state_dict(before, assign=True)  # no hook is left to object


@pytest.mark.parametrize("algorithm", ["rtn", "hqq"])
def test_an_optimizer_made_before_trains_the_same_parameters(algorithm: str) -> None:
    models = [Model()]
    models.append(copy.deepcopy(models[0]))
    for model in models:
        params: list[Any] = [*model.parameters()]
        optimizer = torch.optim.AdamW(params)
        params[0].no_decay = True
        for change in (lambda model: None, lambda model: prepare_(model, EVERYTHING, algorithm=algorithm), release_):
            change(model)
            if model is models[1]:
                state = optimizer.state_dict()
                optimizer = torch.optim.AdamW(model.parameters())
                optimizer.load_state_dict(state)
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert params[0].no_decay
        assert all(param is before for param, before in zip(model.parameters(), params, strict=True))
    for param, want in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(param, want)


def test_hooks_of_a_parameter_stay_until_they_are_removed() -> None:
    """Such as those of an optimizer that steps within the backward pass."""
    model, seen = Model(), []
    param = model.mlp[0].weight
    handles = (
        param.register_hook(lambda grad: seen.append("gradient")),
        param.register_post_accumulate_grad_hook(lambda param: seen.append(type(param).__name__)),
    )
    for change, called in ((lambda model: prepare_(model, "int4-g32"), "TrainedTensor"), (release_, "Parameter")):
        change(model)
        loss_of(model).backward()
        assert sorted(seen) == sorted(["gradient", called])
        seen.clear()
    for handle in handles:
        handle.remove()
    loss_of(model).backward()
    assert not seen


def test_parameters_that_something_else_holds_are_new_objects() -> None:
    model = Model()
    held, before = loss_of(model), model.embed.weight
    with pytest.warns(UserWarning, match=r"of 9 weights \(embed.weight, .*made before does not train them"):
        prepare_(model, EVERYTHING)
    assert model.head.weight is model.embed.weight is not before
    held.backward()
    assert before.grad is not None
    assert model.embed.weight.grad is None


def test_what_takes_a_prepared_model_for_a_float_one_is_told(tmp_path: Path) -> None:
    model = Model()
    prepare_(model, "int4-g32")
    with pytest.raises(ArgumentError, match=r"is a TrainedTensor.* quantized by its convert_\(\)"):
        bp.quantize_(model, "int8")
    with pytest.raises(ArgumentError, match=r"is a TrainedTensor.* to save it, first convert_\(model\) or release_"):
        bp.save(model, tmp_path)
    for verb in (bp.explain, bp.dequantize_):
        with pytest.raises(ArgumentError, match=r"weight is in training, .*convert_\(model\) .*, and release_"):
            verb(model)
    bp.save(Model(), tmp_path)
    with pytest.raises(ArgumentError, match=r"from its state_dict\(\).* load before prepare_"):
        bp.load(model, tmp_path)
    assert convert_(model).layers


def test_static_inputs_are_calibrated() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
    batches = [torch.randn(16, 64) for _ in range(2)]
    floats = copy.deepcopy(model)
    with pytest.raises(ArgumentError, match=r"2 weights .* have a static input scale.*: give calibrate=batches"):
        prepare_(model, "int8-static")
    prepare_(model, "int8-static", calibrate=batches)
    y = model(batches[0])
    y.sum().backward()
    convert_(model)
    assert torch.equal(model(batches[0]), y)
    bp.quantize_(floats, "int8-static", calibrate=batches)
    assert torch.equal(floats(batches[0]), y)


def linears(**prepared: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 32), nn.Conv1d(32, 32, 1), nn.Embedding(8, 16))
    if prepared:
        prepare_(model, **prepared)
    return model


@pytest.mark.parametrize(
    ("do", "error", "match"),
    [
        (lambda: prepare_(linears(recipe="int8"), "int8"), ArgumentError, "0.weight is prepared for int8 already"),
        (lambda: convert_(linears()), ArgumentError, "no weight of this model is prepared"),
        (lambda: release_(linears()), ArgumentError, "no weight of this model is prepared"),
        (lambda: prepare_(linears().double(), "int8"), ArgumentError, "0.weight is torch.float64; cast"),
        (
            lambda: linears(recipe="int8").double()[0](torch.ones(1, 64).double()),  # type: ignore[index, operator]
            ArgumentError,
            r"of torch.float32, torch.bfloat16, torch.float16, not torch.float64 \[32, 64\]: .* model.float\(\)",
        ),
        (lambda: prepare_(linears(), {"9": "int8"}), RecipeError, "rule '9'"),
        (
            lambda: prepare_(linears(), "int8", gradients="int8"),
            ArgumentError,
            "0.weight: int8 leaves inputs as they are",
        ),
        (
            lambda: prepare_(linears(), {"2": "int8-dyn"}, gradients="int8"),
            ArgumentError,
            "2.weight is of kind 'embedding'; gradients are rounded for linear, experts only",
        ),
    ],
)
def test_what_cannot_be_prepared(do: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        do()


def test_a_quantized_model_is_not_trained() -> None:
    model = linears()
    bp.quantize_(model, "int8")
    with pytest.raises(ArgumentError, match=r"0.weight is int8; floats are trained: dequantize_"):
        prepare_(model, "int4-g32")


def test_nothing_is_changed_where_something_is_wrong() -> None:
    model = linears()
    with pytest.raises(ArgumentError):
        prepare_(model, {"0": "int8-dyn", "2": "int8-dyn"}, gradients=Gradients())
    assert type(model[0].weight.data) is Tensor  # type: ignore[index, union-attr]


def test_values_that_diverged_are_not_converted() -> None:
    """No weight is converted, so that training can continue from another checkpoint."""
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8))
    prepare_(model, "int8")
    with torch.no_grad():
        model[1].weight.fill_(float("inf"))
    with pytest.raises(ArgumentError, match=r"1.weight holds NaN or infinity"):
        convert_(model)
    assert isinstance(model[0].weight, TrainedTensor)


def test_learned_scales_are_not_merged_if_a_weight_diverged() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8))
    bp.quantize_(model, {"0": "int8", "*": "skip"})
    learn_scales_(model)
    prepare_(model, {"1": "int8"})
    with torch.no_grad():
        model[1].weight.fill_(float("nan"))
    with pytest.raises(ArgumentError, match=r"1.weight holds NaN or infinity"):
        convert_(model)
    assert hasattr(model[0], "parametrizations")
    with torch.no_grad():
        model[1].weight.fill_(1)
    assert [layer.name for layer in convert_(model).layers] == ["0.weight", "1.weight"]


def test_what_was_chosen_can_be_read() -> None:
    text = str(prepare_(linears(), "int8"))
    assert "0.weight: int8 (the scheme for all linear layers)" in text
    assert "2.weight: left as it is (a scheme given by name leaves embeddings as they are; " in text


def test_the_report_has_every_weight() -> None:
    """A layer that was replaced after prepare_, as transformers does when it resizes embeddings, stays float."""
    model = Model()
    bp.quantize_(model, {"mlp.0": "int8", "*": "skip"})
    plan = prepare_(model, {"mlp.2": "int4-g32", "attention.*": "int4-g32", "*": "skip"})
    model.attention.out_proj = nn.Linear(64, 64)
    report = convert_(model)
    assert {layer.name for layer in report.layers} == {choice.name for choice in plan.choices}
    assert {layer.name: layer.scheme for layer in report.quantized} == {
        "mlp.0.weight": "int8",
        "mlp.2.weight": "int4-g32",
        "attention.in_proj_weight": "int4-g32",
    }
    assert {layer.reason for layer in report.skipped} == {"not prepared"}
    assert [layer.name for layer in report.layers if layer.tied] == ["head.weight"]
