"""Training from the result of an algorithm: it starts from its numbers and keeps its scales."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitport as bp
from bitport.algorithms.solving import uses_data
from bitport.errors import ArgumentError
from bitport.numerics import fake_quantize, from_storage, sqnr
from bitport.ops.samples import product_budget
from bitport.schemes import preset
from bitport.tensor import QTensor, quantize_tensor
from bitport.train import TrainedTensor, convert_, prepare_, release_
from bitport.train.fixed import Fixed, fixed_of
from bitport.train.tensor import Rounding
from tests.algorithms.test_awq import DATA, Unequal
from tests.integrations.sizes import SMALL
from tests.train.test_prepare import EVERYTHING, IDS, Model, loss_of

CASES = [
    ("clip", "mxfp4"),
    ("clip", "nf4"),
    ("hqq", "int3-g32"),
    ("gptq", "int2-g32"),
    ("gptq", "int4-int8"),
    ("gptq", "nvfp4"),
    ("gptq", "int8-static"),
    ("signround", "int2"),
    ("awq", "int4-channel"),
    ("awq+gptq", "int4-channel"),
    ("awq+gptq", "int4-int8"),
    ("smooth", "int8-dyn"),
    ("rotate+gptq", "int3-g32"),
]
X = torch.randn(9, 64, generator=torch.Generator().manual_seed(9))


def unequal() -> Unequal:
    torch.manual_seed(0)
    return Unequal()


def pair(algorithm: str, scheme: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """Return a model in training and a quantized one, made in the same way."""
    data = [each.to(dtype) for each in DATA] if uses_data(algorithm, scheme) else None
    quantized, prepared = unequal().to(dtype), unequal().to(dtype)
    bp.quantize_(quantized, scheme, algorithm=algorithm, calibrate=data)
    prepare_(prepared, scheme, algorithm=algorithm, calibrate=data)
    return prepared, quantized


def weights(model: nn.Module) -> dict[str, Any]:
    return {name: param for name, param in model.named_parameters() if param.dim() > 1}


def same_numbers(model: nn.Module, other: nn.Module) -> bool:
    theirs = weights(other)
    assert all(isinstance(q, QTensor) for q in theirs.values())
    return all(torch.equal(q, theirs[name]) for name, q in weights(model).items())


@pytest.mark.parametrize(("algorithm", "scheme"), CASES)
def test_it_starts_from_the_quantized_model(algorithm: str, scheme: str) -> None:
    prepared, quantized = pair(algorithm, scheme)
    y = prepared(X)
    assert torch.equal(y, quantized(X))
    y.sum().backward()
    assert all(param.grad is not None and bool(param.grad.any()) for param in weights(prepared).values())
    report = convert_(prepared)
    assert {layer.algorithm for layer in report.quantized} == {report.algorithm} == {"trained"}
    assert same_numbers(prepared, quantized)


def test_some_inputs_are_pre_scaled() -> None:
    """Ensures that the cases above include such weights."""
    for scheme in ("int4-channel", "int4-int8"):
        prepared, _ = pair("awq+gptq", scheme)
        assert any(param.pre_scale is not None for param in weights(prepared).values())


@pytest.mark.parametrize(("algorithm", "scheme"), CASES)
def test_scales_are_held(algorithm: str, scheme: str) -> None:
    prepared, quantized = pair(algorithm, scheme)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.05)
    for _ in range(3):
        prepared(X).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        y = prepared(X)
    convert_(prepared)
    assert torch.equal(prepared(X), y)
    assert not same_numbers(prepared, quantized)
    for name, q in weights(prepared).items():
        for mine, theirs in zip(fixed_of(q), fixed_of(weights(quantized)[name]), strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))  # type: ignore[union-attr]


def test_every_kind_starts_from_what_it_was_quantized_to() -> None:
    """Weights that gptq cannot handle, here the convolutions and the table tied to the head, recompute scales from
    their values."""
    torch.manual_seed(1)
    model = Model()
    quantized = copy.deepcopy(model)
    for algorithm in ("gptq", "clip"):
        trained, other = copy.deepcopy(model), copy.deepcopy(quantized)
        data = [IDS] if uses_data(algorithm, EVERYTHING) else None
        prepare_(trained, EVERYTHING, algorithm=algorithm, calibrate=data)
        bp.quantize_(other, EVERYTHING, algorithm=algorithm, calibrate=data)
        follow = {name for name, param in trained.named_parameters() if not getattr(param, "fixed", "no weight")}
        assert follow == ({"embed.weight", "conv.weight", "up.weight"} if algorithm == "gptq" else set())
        loss = loss_of(trained)
        assert torch.allclose(loss, loss_of(other), rtol=1e-5)
        loss.backward()
        assert all(param.grad is not None for param in trained.parameters())
        convert_(trained)
        assert trained.head.weight is trained.embed.weight
        for name, param in other.named_parameters():
            assert torch.equal(param, trained.get_parameter(name)), name


EXPERTS = {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        ("Qwen3MoeConfig", EXPERTS),
        ("GptOssConfig", {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}),
        ("GPT2Config", {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4}),
    ],
)
def test_models_of_transformers(config: str, fields: dict[str, Any]) -> None:
    """With experts, and with transposed weights."""
    transformers = pytest.importorskip("transformers", reason="needs the extra: pip install 'bitport[hf]'")
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**fields)).float().eval()
    quantized, ids = copy.deepcopy(made), torch.arange(40).reshape(2, 20)
    prepare_(made, "int3-g32", algorithm="awq+gptq", calibrate=[ids])
    bp.quantize_(quantized, "int3-g32", algorithm="awq+gptq", calibrate=[ids])
    logits = made(input_ids=ids).logits
    with torch.no_grad():
        assert torch.allclose(logits, quantized(input_ids=ids).logits, atol=1e-4)
    logits.sum().backward()
    held = [param for param in made.parameters() if isinstance(param, TrainedTensor) and param.fixed is not None]
    assert len(held) > 7
    convert_(made)
    for name, param in quantized.named_parameters():
        assert torch.equal(param, made.get_parameter(name)), name


def test_values_lie_between_the_float_weights_and_what_was_chosen() -> None:
    """A weight that rounds to its code is unchanged; any other is moved just into the cell of its code: the steps of
    bisection are 2^-12 of at most 8 codes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32, bias=False))
    floats, quantized = model[0].weight.detach().clone(), copy.deepcopy(model)
    prepare_(model, "int3-g32", algorithm="gptq", calibrate=DATA)
    bp.quantize_(quantized, "int3-g32", algorithm="gptq", calibrate=DATA)
    q, value = quantized[0].weight, model[0].weight.value.double()
    codes = from_storage(q.plain().data, q.scheme.weight.number, 64).double()
    scale, zero = (part.double().repeat_interleave(32, 1) for part in (q.plain().scale, q.plain().zero))
    steps, given = value / scale + zero, floats.double() / scale + zero
    assert torch.equal(steps.round().clamp(0, 7), codes)
    moved = value != floats
    assert torch.equal(moved, given.round().clamp(0, 7) != codes)
    assert 0.05 < moved.double().mean() < 0.6
    assert bool((((steps - codes) * (given - codes))[moved] > 0).all())
    off = (steps - codes).abs()[moved]
    assert off.max() <= 0.5
    assert off.min() > 0.5 - 8 * 2.0**-12 - 1e-5


@pytest.mark.parametrize("scheme", ["int4-channel", "int4-int8"])
def test_gradients_of_pre_scaled_weights(scheme: str) -> None:
    """y = r(s x) c^T with the codes' numbers c = r(w / s): in float64, gx = s g c and gw = g^T r(s x) / s."""
    torch.manual_seed(0)
    how, s = preset(scheme), torch.rand(64) * 3 + 0.1
    value = torch.randn(32, 64)
    q = quantize_tensor(value / s, scheme)
    w = nn.Parameter(TrainedTensor(value, Rounding(how), fixed=Fixed(*q.plain()[1:], s)))
    x, g = torch.randn(16, 64, requires_grad=True), torch.randn(16, 32)
    y = F.linear(x, w)
    y.backward(g)
    seen = x.detach() * s
    seen = (fake_quantize(seen, how.act) if how.act else seen).double()
    numbers = q.dequantize(torch.float32).double()
    budget = product_budget(torch.float32, 64, 32 * 64)
    assert x.grad is not None
    assert w.grad is not None
    assert sqnr(seen @ numbers.t(), y.detach().double()) > budget
    assert sqnr(g.double() @ numbers * s.double(), x.grad.double()) > budget
    assert sqnr(g.double().t() @ seen / s.double(), w.grad.double()) > budget
    with torch.no_grad():
        back = torch.randn(5, 32)
        along_n = back.double() @ (numbers * s.double())
        assert sqnr(along_n, (back @ w).double()) > product_budget(torch.float32, 32, 5 * 64)
        out_of_sight = torch.ops.aten.mm.default(x.detach(), w.t())
        assert sqnr(seen @ numbers.t(), out_of_sight.double()) > budget
        assert torch.equal(F.embedding(torch.tensor([3, 1]), w), (q.dequantize() * s)[[3, 1]])


def held(*shape: int, scheme: str = "int4-g32") -> tuple[nn.Parameter, Tensor]:
    """Return a weight whose fixed scales differ from those of its values, and the floats that it represents."""
    value = torch.randn(*shape)
    q = quantize_tensor(value * 0.7, scheme)
    fixed = fixed_of(q)
    how = preset(scheme)
    rounded = QTensor(fixed.rounded(value, how.weight), how, shape=shape, dtype=value.dtype, matrix=q.matrix)
    return nn.Parameter(TrainedTensor(value, Rounding(how), fixed=fixed)), rounded.dequantize()


def test_pieces_are_rounded_as_the_whole() -> None:
    param, whole = held(64, 128)
    x, half = torch.eye(128), torch.eye(64)
    assert torch.equal(F.linear(x, param).t(), whole)
    assert not torch.equal(whole, quantize_tensor(param.value, "int4-g32").dequantize())  # type: ignore[attr-defined]
    top, bottom = param.chunk(2)
    assert torch.equal(F.linear(x, top).t(), whole[:32])
    assert torch.equal(F.linear(x, bottom).t(), whole[32:])
    assert torch.equal(F.linear(x, param[7:9]).t(), whole[7:9])
    assert torch.equal(F.linear(half, param[:, 64:]).t(), whole[:, 64:])
    assert torch.equal(F.linear(half, param.t()[64:].t()).t(), whole[:, 64:])
    assert torch.equal(F.embedding(torch.tensor([5, 1, 5]), param), whole[[5, 1, 5]])
    assert torch.equal(param[torch.tensor([5, 1])], whole[[5, 1]])
    F.linear(x, bottom).sum().backward()
    assert param.grad is not None
    assert not param.grad[:32].any()
    assert param.grad[32:].all()


@pytest.mark.parametrize("scheme", ["int4-g32", "mxfp4-wo", "nf4"])
def test_pieces_of_experts_are_rounded_as_the_whole(scheme: str) -> None:
    param, whole = held(4, 32, 64, scheme=scheme)
    x = torch.eye(64)
    assert torch.equal(F.linear(x, param[2]).t(), whole[2])
    assert torch.equal(F.linear(x, param[1:3][1]).t(), whole[2])
    assert torch.equal(F.linear(x, param.unbind()[3]).t(), whole[3])
    assert torch.equal(F.linear(x, param[torch.tensor([3, 0])][1]).t(), whole[0])
    offs = torch.tensor([16, 16, 32, 64], dtype=torch.int32)
    y = F.grouped_mm(x, param.mT, offs=offs)
    assert torch.allclose(y[:16], whole[0].t()[:16])
    assert torch.allclose(y[32:], whole[3].t()[32:])


def test_a_convolution_is_not_cut_into_pieces_that_are_used() -> None:
    model = nn.Sequential(nn.Conv1d(32, 32, 3))
    prepare_(model, [("*", "int4-g32", ("conv",))], algorithm="clip")
    weight: Any = model[0].weight
    with pytest.raises(ArgumentError, match="cut in dimension 1"):
        weight[:, :16]
    with torch.no_grad():
        piece = weight[:16]
    with pytest.raises(ArgumentError, match="is a shard, which is not rounded alone"):
        F.conv1d(torch.randn(1, 32, 9), piece)


def test_copies_and_casts() -> None:
    prepared, quantized = pair("awq+gptq", "nvfp4")
    want = quantized(X)
    assert torch.equal(copy.deepcopy(prepared)(X), want)
    assert torch.equal(pickle.loads(pickle.dumps(prepared))(X), want)
    with torch.inference_mode():
        assert torch.equal(prepared(X), want)
    prepared.share_memory()
    assert torch.equal(prepared(X), want)


def test_a_cast_casts_values_and_not_scales() -> None:
    prepared, _ = pair("awq+gptq", "int4-channel")
    before = {name: param.fixed for name, param in weights(prepared).items()}
    prepared.to(torch.bfloat16)
    for name, param in weights(prepared).items():
        assert param.value.dtype == torch.bfloat16
        assert torch.equal(param.scale, before[name].scale)
        assert param.scale.dtype == torch.float32
    with torch.no_grad():
        y = prepared(X.bfloat16())
        convert_(prepared)
        assert torch.equal(prepared(X.bfloat16()), y)


def test_autocast_multiplies_what_the_values_round_to() -> None:
    prepared, quantized = pair("awq+gptq", "int4-channel")
    with torch.autocast("cpu", torch.bfloat16):
        y = prepared(X)
        assert torch.equal(y, quantized(X))
    y.float().sum().backward()


@pytest.mark.parametrize("algorithm", ["gptq", "awq+gptq"])
def test_compiled(algorithm: str) -> None:
    prepared, _ = pair(algorithm, "int4-channel")
    alone = copy.deepcopy(prepared)
    torch._dynamo.reset()
    compiled = torch.compile(prepared, fullgraph=True, backend="aot_eager")
    for model in (compiled, alone):
        model(X).square().sum().backward()
    for (name, param), want in zip(prepared.named_parameters(), alone.parameters(), strict=True):
        assert param.grad is not None
        assert torch.allclose(param.grad, want.grad, rtol=1e-4, atol=1e-5), name  # type: ignore[arg-type]


def test_half_precision_starts_from_the_same_numbers() -> None:
    prepared, quantized = pair("gptq", "int4-g32", torch.bfloat16)
    assert torch.equal(prepared(X.bfloat16()), quantized(X.bfloat16()))


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Whatever is raised within, the parameters are the same objects with the same values."""
    before = {name: (param, param.detach().clone()) for name, param in model.named_parameters()}
    try:
        yield
    finally:
        for name, param in model.named_parameters():
            assert param is before[name][0]
            assert torch.equal(param, before[name][1])


def test_codes_that_the_dtype_of_the_values_cannot_tell_apart() -> None:
    """bfloat16 has 8 bits: if the range of a block is far from zero, its numbers are further apart than the codes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)).to(torch.bfloat16)
    model[1].weight.data.uniform_(0.5, 1.05)
    data = [each.to(torch.bfloat16) for each in DATA]
    with pytest.raises(ArgumentError, match=r"1\.weight: \d+ of its codes .* cast the model"), unchanged(model):
        prepare_(model, "int8-g32-asym", algorithm="gptq", calibrate=data)


def test_an_error_in_calibration_leaves_float_weights() -> None:
    """By the time the second weight fails, the first is quantized."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
    model[0].bias.data[5] = torch.inf
    with pytest.raises(ArgumentError, match=r"NaN or infinity at the input of 1\.weight"), unchanged(model):
        prepare_(model, "int4-g32", algorithm="gptq", calibrate=DATA)


def test_release_gives_back_floats() -> None:
    prepared, _ = pair("awq+gptq", "int4-channel")
    values = {name: param.value.clone() for name, param in weights(prepared).items()}
    release_(prepared)
    assert all(
        type(param.data) is Tensor and torch.equal(param, values[name]) for name, param in weights(prepared).items()
    )
    assert not any("_extra_state" in name for name in prepared.state_dict())


def test_what_is_refused() -> None:
    with pytest.raises(ArgumentError, match="gptq looks at the inputs of layers; give calibrate=batches"):
        prepare_(unequal(), "int4", algorithm="gptq")
    with pytest.raises(ArgumentError, match=r"gradients= trains in low precision, .* leave out one of"):
        prepare_(unequal(), "int8-dyn", algorithm="clip", gradients="int8")
    with pytest.raises(ArgumentError, match=r"up\.weight is on meta and holds no numbers for hqq; load them first"):
        prepare_(unequal().to("meta"), "int4", algorithm="hqq")
    with pytest.raises(ArgumentError, match="unknown algorithm 'gptg'"):
        prepare_(unequal(), "int4", algorithm="gptg")
