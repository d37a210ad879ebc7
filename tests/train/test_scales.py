"""Learning scales: gradients against float64, and that nothing except scales changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bitport as bp
from bitport.errors import ArgumentError
from bitport.numerics import fake_quantize, sqnr
from bitport.numerics.blocks import expand
from bitport.ops.matmul import FEW_ROWS
from bitport.tensor import QTensor, quantize_tensor
from bitport.tensor.qtensor import rows_of
from bitport.train import convert_, learn_scales_, prepare_, release_
from tests import ranks
from tests.train.steps import steps

SCHEMES = (
    "int4-g32",
    "int2-g32-sym",
    "int3",
    "int8",
    "nf4",
    "fp8",
    "fp8-row",
    "fp8-wo",
    "fp8-block",
    "int8-dyn",
    "int4-int8",
)
BUDGET = 110.0
"""dB. A gradient sums products in float32 twice, over rows and over a block. Rounding errors add up like random ones:
sums of at most 131 * 300 terms lose no more than sqrt(2) * 2^-24 * log2 of that, 119 dB, for numbers that do not
cancel."""


def learned(module: nn.Module, name: str = "weight") -> tuple[QTensor, nn.Parameter]:
    """Start learning, and return a copy of the original weight with the parameter that is learned."""
    q = copy.deepcopy(getattr(module, name))
    learn_scales_(nn.ModuleList([module]))
    return q, module.parametrizations[name].original0  # type: ignore[index, union-attr, return-value]


def judged(q: QTensor, change: Tensor, loss: Callable[[Tensor], Tensor], kind: str = "linear") -> Tensor:
    """The float64 gradient of ``loss`` for the matrix [.., N, K] with columns in code order, where no scale has changed
    yet."""
    codes = q.replace(perm=None, pre_scale=None).dequantize(torch.float64)
    none = torch.zeros(change.shape, dtype=torch.float64, requires_grad=True)
    factors = expand(1 + none, q.scheme.weight.block, q.matrix.n, q.matrix.k)
    (grad,) = torch.autograd.grad(loss(rows_of(codes, kind, q.transposed) * factors), none)
    return grad


@pytest.mark.parametrize("prepared", [False, True], ids=["plain", "act-order and pre-scale"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_gradient_of_a_linear_layer(scheme: str, prepared: bool) -> None:
    n, k = 131, 300
    layer, x, g = nn.Linear(k, n), torch.randn(64, k), torch.randn(64, n)
    order, pre_scale = torch.randperm(k), torch.rand(k) + 0.5
    extra = {"perm": order.int(), "pre_scale": pre_scale} if prepared else {}
    layer.weight = nn.Parameter(quantize_tensor(layer.weight.detach(), scheme, **extra), requires_grad=False)
    before = copy.deepcopy(layer)
    q, change = learned(layer)

    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    y, same = (module(each) for module, each in zip((layer, before), inputs, strict=True))
    (y * g).sum().backward()
    (same * g).sum().backward()

    seen = (x * pre_scale)[:, order] if prepared else x
    seen = fake_quantize(seen, q.scheme.act) if q.scheme.act else seen
    want = judged(q, change, lambda w: (F.linear(seen.double(), w) * g.double()).sum())
    assert torch.equal(y, same)
    assert sqnr(want, change.grad) > BUDGET
    assert sqnr(inputs[1].grad, inputs[0].grad) > BUDGET
    assert torch.equal(layer.bias.grad, g.sum(0))


def test_the_gradient_of_a_table() -> None:
    table, ids = nn.Embedding(50, 70, padding_idx=3), torch.tensor([[1, 3, 7], [7, 49, 1]])
    bp.quantize_(table, [("*", "int4-g32", ("embedding",))])
    q, change = learned(table)
    g = torch.randn(2, 3, 70)
    (table(ids) * g).sum().backward()
    want = judged(q, change, lambda w: (F.embedding(ids, w, padding_idx=3) * g.double()).sum())
    assert sqnr(want, change.grad) > BUDGET
    assert not change.grad[3].any()


def test_the_gradient_of_a_convolution() -> None:
    conv, x = nn.Conv2d(6, 10, 3, padding=1), torch.randn(2, 6, 8, 8)
    bp.quantize_(conv, [("*", "int4-g32", ("conv",))])
    q, change = learned(conv)
    y = conv(x)
    g = torch.randn_like(y)
    (y * g).sum().backward()

    def loss(w: Tensor) -> Tensor:
        return (F.conv2d(x.double(), w.reshape(conv.weight.shape), padding=1) * g.double()).sum()

    assert sqnr(judged(q, change, loss, "conv"), change.grad) > BUDGET


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 48, 64))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return F.grouped_mm(x, self.weight.mT, offs=ends)


@pytest.mark.parametrize("scheme", ["int4-g32", "fp8-row"])
def test_the_gradient_of_experts(scheme: str) -> None:
    experts, x, ends = Experts(), torch.randn(20, 64), torch.tensor([5, 5, 20], dtype=torch.int32)
    bp.quantize_(experts, scheme)
    q, change = learned(experts)
    y, g = experts(x, ends), torch.randn(20, 48)
    (y * g).sum().backward()
    seen = fake_quantize(x, q.scheme.act) if q.scheme.act else x

    def loss(w: Tensor) -> Tensor:
        parts = [F.linear(seen[a:b].double(), each) for a, b, each in zip((0, 5, 5), ends.tolist(), w, strict=True)]
        return (torch.cat(parts) * g.double()).sum()

    assert sqnr(judged(q, change, loss), change.grad) > BUDGET
    assert not change.grad[1].any()


def test_a_weight_that_lies_the_other_way_round() -> None:
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    layer, x, g = pytorch_utils.Conv1D(40, 64), torch.randn(5, 64), torch.randn(5, 40)
    bp.quantize_(layer, "int4-g32")
    q, change = learned(layer)
    (layer(x) * g).sum().backward()
    want = judged(q, change, lambda w: (F.linear(x.double(), w) * g.double()).sum())
    assert sqnr(want, change.grad) > BUDGET


def test_attention_whose_product_is_out_of_sight() -> None:
    attention, x = nn.MultiheadAttention(64, 4, batch_first=True), torch.randn(2, 5, 64)
    bp.quantize_(attention, "int8")
    before = copy.deepcopy(attention)
    q, change = learned(attention, "in_proj_weight")
    y, _ = attention(x, x, x)
    torch.testing.assert_close(y, before(x, x, x)[0])  # without native kernels, PyTorch sums in another order
    y.sum().backward()

    def loss(w: Tensor) -> Tensor:
        exact = copy.deepcopy(before).double()
        exact.in_proj_weight = None  # type: ignore[assignment]
        bp.dequantize_(exact, torch.float64)
        inputs = {name: each.detach() for name, each in exact.named_parameters()} | {"in_proj_weight": w}
        return torch.func.functional_call(exact, inputs, (x.double(),) * 3)[0].sum()

    assert sqnr(judged(q, change, loss), change.grad) > BUDGET


def small(dtype: torch.dtype = torch.float32, scheme: str = "int4-g32") -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 40)).to(dtype)
    bp.quantize_(model, scheme)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["int4-g32", "int8-dyn"])
def test_scales_alone_change_and_the_model_stays_what_was_trained(dtype: torch.dtype, scheme: str) -> None:
    model = small(dtype, scheme)
    before, names = copy.deepcopy(model), {name for name, _ in model.named_parameters()}
    plan = learn_scales_(model)
    assert [choice.name for choice in plan.quantized] == ["0.weight", "2.weight"]
    losses = steps(model, 5, dtype=dtype)
    assert losses[-1] < losses[0]
    x = torch.randn(7, 64, dtype=dtype)
    y = model(x)
    report = convert_(model)
    assert torch.equal(model(x), y)
    assert {name for name, _ in model.named_parameters()} == names
    assert report.algorithm == "scales learned"
    for was, now in ((before[0].weight, model[0].weight), (before[2].weight, model[2].weight)):
        assert isinstance(now, QTensor)
        assert not now.requires_grad
        assert (now.scheme, now.scale.dtype) == (was.scheme, was.scale.dtype)
        assert torch.equal(now.plain().data, was.plain().data)
        assert not torch.equal(now.plain().scale, was.plain().scale)
        if was.zero is not None:
            assert torch.equal(now.plain().zero, was.plain().zero)


def test_a_converted_model_is_saved_as_any_other(tmp_path: Path) -> None:
    model = small()
    learn_scales_(model)
    steps(model, 5)
    convert_(model)
    bp.save(model, tmp_path / "m")
    x = torch.randn(3, 64)
    assert torch.equal(bp.load(small, tmp_path / "m")(x), model(x))


def test_training_goes_on_from_a_checkpoint() -> None:
    models = [small(), small(), small()]
    for model in models:
        learn_scales_(model)
    steps(models[0], 5)
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(3, 64)
    assert torch.equal(models[1](x), models[0](x))
    assert torch.equal(copy.deepcopy(models[0])(x), models[0](x))
    assert not torch.equal(models[2](x), models[0](x))


def test_a_copy_is_converted_apart() -> None:
    model, x = small(), torch.randn(3, 64)
    learn_scales_(model)
    other, want = copy.deepcopy(model), model(x)
    convert_(model)
    assert type(model[0]) is nn.Linear
    assert torch.equal(other(x), want)
    convert_(other)
    assert torch.equal(other(x), want)


class GatedExperts(nn.Module):
    """Several weights in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Parameter(torch.randn(3, 64, 64) / 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(torch.bmm(x, self.gate.mT).sigmoid() * torch.bmm(x, self.up.mT), self.down.mT)


def test_a_copy_of_several_weights_in_one_module_is_converted_apart() -> None:
    """With so many rows both compute by the dequantized weight. With fewer only the converted model has a kernel for
    packed experts, whose sums may be in another order."""
    model, x = GatedExperts(), torch.randn(3, FEW_ROWS + 1, 64)
    bp.quantize_(model, "int4-g32")
    learn_scales_(model)
    other, want = copy.deepcopy(model), model(x)
    convert_(model)
    assert type(model) is GatedExperts
    assert torch.equal(model(x), want)
    assert torch.equal(other(x), want)
    convert_(other)
    assert torch.equal(other(x), want)


def test_tied_weights_learn_one_change() -> None:
    model = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 50, bias=False))
    model[1].weight = model[0].weight
    bp.quantize_(model, [("*", "int4-g32", ("linear", "embedding"))])
    learn_scales_(model)
    (change,) = (param for param in model.parameters() if param.requires_grad)
    ids = torch.tensor([1, 2, 49])
    model(ids).sum().backward()
    assert change.grad.all(1).sum() == 50  # every row from the product, three from the lookup
    report = convert_(model)
    assert model[0].weight is model[1].weight
    assert [layer.tied for layer in report.layers] == [False, True]


@pytest.mark.parametrize("how", ["checkpoint", "no_grad", "inference_mode", "compile", "autocast"])
def test_the_numbers_are_those_of_the_quantized_model(how: str) -> None:
    model = small()
    before = copy.deepcopy(model)
    learn_scales_(model)
    x = torch.randn(5, 64)
    run: dict[str, Callable[[], Tensor]] = {
        "checkpoint": lambda: checkpoint(model, x, use_reentrant=False),  # type: ignore[dict-item, return-value]
        "no_grad": lambda: torch.no_grad()(model)(x),
        "inference_mode": lambda: torch.inference_mode()(model)(x),
        "compile": lambda: torch.compile(model)(x),
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16)(model)(x),
    }
    y = run[how]()
    assert torch.equal(y, torch.autocast("cpu", torch.bfloat16)(before)(x) if how == "autocast" else before(x))
    if how in ("no_grad", "inference_mode"):
        return
    y.float().sum().backward()
    twin = small()
    learn_scales_(twin)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        out = twin(x)
    out.float().sum().backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert one.grad is None or torch.equal(one.grad, other.grad)


def test_what_is_kept_for_the_backward_pass_are_codes() -> None:
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    bp.quantize_(model, "int4")
    learn_scales_(model)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.randn(1, 512))
    assert sum(kept.values()) < 4 * 512 * 512 * 1  # a byte per weight; floats would be four


def test_scales_that_are_powers_of_two_are_left() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    bp.quantize_(model, {"0": "int4-g32", "1": "mxfp4"})
    plan = learn_scales_(model)
    assert [(choice.name, choice.scheme is None) for choice in plan.choices] == [
        ("0.weight", False),
        ("1.weight", True),
    ]
    assert "float8_e8m0fnu, too coarse" in plan["1.weight"].reason


def broken(model: Any) -> Any:
    with torch.no_grad():
        model[0].parametrizations.weight.original0[3] = float("nan")
    return model


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: learn_scales_(model), "learned already; convert_"),
        (lambda model: release_(model), "no weight of this model is prepared"),
        (lambda model: bp.dequantize_(model), r"the scales of 0.weight, 2.weight are being learned: .*convert_"),
        (lambda model: bp.quantize_(model, "int8"), r"the scales of 0.weight, 2.weight are being learned: .*convert_"),
        (lambda model: torch.vmap(model)(torch.randn(2, 64)), r"torch.vmap cannot transform .*convert_\(model\)"),
        (lambda model: learn_scales_(nn.Linear(4, 4)), "(?s)no scales of this model can be learned.*not quantized"),
        (lambda model: convert_(broken(model)), "0.weight: scales that were learned are NaN or infinite"),
        (lambda model: model[0].weight + 1, "on a weight in training, which can only be used in products"),
    ],
)
def test_refusals(call: Callable[[Any], Any], message: str) -> None:
    model = small()
    learn_scales_(model)
    with pytest.raises(ArgumentError, match=message):
        call(model)
    assert all(hasattr(each, "parametrizations") for each in (model[0], model[2]))


def test_beside_weights_that_are_trained_themselves() -> None:
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 40))
    bp.quantize_(model, {"0": "int4-g32", "1": "skip"})
    prepare_(model, [("0", "skip"), ("1", "int8")])
    learn_scales_(model)
    steps(model, 5)
    report = convert_(model)
    assert {layer.name: layer.algorithm for layer in report.layers} == {"0.weight": "scales learned", "1.weight": "rtn"}


CHECKS = "tests.train.on_scales"


@pytest.mark.xdist_group("scales in processes")  # started once, by one worker
@pytest.mark.parametrize("world", ranks.WORLDS)
@pytest.mark.parametrize("check", ranks.names(CHECKS))
def test_in_several_processes(check: str, world: int) -> None:
    ranks.must_pass(check, CHECKS, world)


def test_an_optimizer_made_before_is_told_of() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8))
    bp.quantize_(model, "int4-g32")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learn_scales_(model)
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="no scale has changed.*make the optimizer after learn_scales_"):
        convert_(model)
