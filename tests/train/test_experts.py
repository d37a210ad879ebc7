"""Experts in training: grouped and batched products, and the ways in which transformers multiplies with them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitport.errors import ArgumentError
from bitport.numerics import fake_quantize, sqnr
from bitport.ops.samples import product_budget
from bitport.schemes import preset
from bitport.tensor import quantize_tensor
from bitport.train import GRADIENTS, convert_, prepare_
from bitport.train.tensor import Rounding, TrainedTensor
from tests.integrations.sizes import SMALL

E, T, N, K = 4, 40, 32, 64
OFFS = torch.tensor([10, 10, 25, 36], dtype=torch.int32)
"""The second expert has no rows, and the last four rows belong to no expert."""


def experts(scheme: str, gradients: str | None = None) -> TrainedTensor:
    made = TrainedTensor(torch.randn(E, N, K), Rounding(preset(scheme), GRADIENTS[gradients] if gradients else None))
    made.requires_grad_()
    return made


def by_expert(x: Tensor, w: Tensor) -> Tensor:
    starts = [0, *OFFS.tolist()[:-1]]
    rows = [x[start:end] @ w[at].t() for at, (start, end) in enumerate(zip(starts, OFFS.tolist(), strict=True))]
    return torch.cat([*rows, x.new_zeros(T - int(OFFS[-1]), N)])


@pytest.mark.parametrize("scheme", ["int4-g32", "int8-dyn", "mxfp8", "fp8"])
def test_grouped_product(scheme: str) -> None:
    w = experts(scheme)
    x, g = torch.randn(T, K, requires_grad=True), torch.randn(T, N)
    y = F.grouped_mm(x, w.mT, offs=OFFS)
    y.backward(g)
    assert torch.equal(y, F.grouped_mm(x.detach(), quantize_tensor(w.value, scheme).mT, offs=OFFS))
    act = preset(scheme).act
    factor = (fake_quantize(x, act) if act else x.detach()).double().requires_grad_()
    dense = quantize_tensor(w.value, scheme).dequantize().double().requires_grad_()
    by_expert(factor, dense).backward(g.double())
    assert x.grad is not None
    assert w.grad is not None
    assert sqnr(factor.grad, x.grad.double()) > product_budget(torch.float32, N, T * K)
    assert sqnr(dense.grad, w.grad.double()) > product_budget(torch.float32, 25, E * N * K)


@pytest.mark.parametrize("gradients", [None, "fp8-row-input"])
def test_a_fixed_scale_of_inputs(gradients: str | None) -> None:
    """Used as in the quantized experts, and in the gradient of the weight."""
    scale = torch.tensor([[0.01]])
    rounding = Rounding(preset("int8-static"), GRADIENTS[gradients] if gradients else None)
    w = TrainedTensor(torch.randn(E, N, K), rounding, scale).requires_grad_()
    x, g = torch.randn(T, K), torch.randn(T, N)
    y = F.grouped_mm(x, w.mT, offs=OFFS)
    assert torch.equal(y, F.grouped_mm(x, quantize_tensor(w.value, "int8-static", act_scale=scale).mT, offs=OFFS))
    y.backward(g)
    seen, dense = fake_quantize(x, "int8-tensor", scale).double(), w.value.double().requires_grad_()
    by_expert(seen, dense).backward(g.double())
    assert w.grad is not None
    assert sqnr(dense.grad, w.grad.double()) > product_budget(torch.float32, 25, E * N * K)


@pytest.mark.parametrize(
    ("scheme", "gradients"), [("int8-dyn", "int8"), ("mxfp8", "mxfp8"), ("fp8-row", "fp8-row-input")]
)
def test_rounded_gradients_are_those_of_each_expert_alone(scheme: str, gradients: str) -> None:
    w = experts(scheme, gradients)
    x, g = torch.randn(T, K, requires_grad=True), torch.randn(T, N)
    F.grouped_mm(x, w.mT, offs=OFFS).backward(g)
    assert x.grad is not None
    assert w.grad is not None
    start = 0
    for expert, end in enumerate(OFFS.tolist()):
        own = TrainedTensor(w.value[expert].clone(), w.rounding)
        own.requires_grad_()
        rows = x.detach()[start:end].requires_grad_()
        F.linear(rows, own).backward(g[start:end])
        assert torch.equal(x.grad[start:end], rows.grad)  # type: ignore[arg-type]
        assert torch.equal(w.grad[expert], own.grad)  # type: ignore[arg-type]
        start = end
    assert not x.grad[start:].any()


@pytest.mark.parametrize(("scheme", "gradients"), [("int4-g32", None), ("int8-dyn", None), ("int8-dyn", "int8")])
def test_batched_product(scheme: str, gradients: str | None) -> None:
    w = experts(scheme, gradients)
    x, g = torch.randn(E, 8, K, requires_grad=True), torch.randn(E, 8, N)
    y = torch.bmm(x, w.mT)
    y.backward(g)
    assert w.grad is not None
    for at in range(E):
        own = TrainedTensor(w.value[at].clone(), w.rounding)
        own.requires_grad_()
        single = F.linear(x.detach()[at], own)
        single.backward(g[at])
        assert torch.allclose(y[at], single, atol=1e-4)
        assert torch.allclose(w.grad[at], own.grad, atol=1e-4)  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", ["int4-g32", "int8-dyn"])
def test_compiled(scheme: str) -> None:
    """With the op that transformers uses for dtypes other than bfloat16: the same as in eager mode, including
    gradients."""
    grouped = pytest.importorskip("transformers.integrations.moe")._grouped_mm
    w, x, g = experts(scheme), torch.randn(T, K, requires_grad=True), torch.randn(T, N)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: grouped(x, w.mT, OFFS), fullgraph=True, backend="aot_eager")
    seen = []
    for y in (F.grouped_mm(x, w.mT, offs=OFFS), compiled(x)):
        seen.append((y, *torch.autograd.grad(y, (x, w), g)))
    for mine, wanted in zip(*seen, strict=True):
        torch.testing.assert_close(mine, wanted)
    with torch.no_grad():
        assert torch.equal(compiled(x), seen[0][0])


def test_what_is_no_grouped_product() -> None:
    w = experts("int8")
    with pytest.raises(ArgumentError, match=r"takes \(x, experts, offs="):
        F.grouped_mm(torch.randn(E, T, K), w.mT)
    with pytest.raises(ArgumentError, match=r"pass weight\.mT"):
        F.grouped_mm(torch.randn(T, N), w, offs=OFFS)


def test_products_that_do_not_round_their_gradients() -> None:
    w = experts("int8-dyn", "int8")
    with pytest.raises(ArgumentError, match="does not round its gradients"):
        torch.randn(3, N) @ w[0]


QWEN_MOE = {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ARCHITECTURES = {
    "llama": ("LlamaConfig", SMALL, {}),
    "qwen3-moe-eager": ("Qwen3MoeConfig", QWEN_MOE, {"experts_implementation": "eager"}),
    "qwen3-moe-grouped": ("Qwen3MoeConfig", QWEN_MOE, {"experts_implementation": "grouped_mm"}),
    "qwen3-moe-batched": ("Qwen3MoeConfig", QWEN_MOE, {"experts_implementation": "batched_mm"}),
    "gpt-oss-transposed-experts": ("GptOssConfig", {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}, {}),
    "gpt2-transposed-linear": ("GPT2Config", {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4}, {}),
}


@pytest.mark.parametrize("scheme", ["int4-g32", "int8-dyn"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_models_of_transformers(name: str, scheme: str) -> None:
    """Trained for a step, then converted: the logits do not change."""
    transformers = pytest.importorskip("transformers", reason="needs the extra: pip install 'bitport[hf]'")
    config, fields, options = ARCHITECTURES[name]
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**fields), **options).float()
    model.eval()  # no dropout
    prepare_(model, scheme)
    ids = torch.arange(22).reshape(2, 11)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = model(input_ids=ids, labels=ids).loss
    before.backward()
    trained = [param for param in model.parameters() if isinstance(param, TrainedTensor)]
    assert len(trained) > 7
    assert all(param.grad is not None and bool(param.grad.any()) for param in trained)
    optimizer.step()
    with torch.no_grad():
        assert model(input_ids=ids, labels=ids).loss < before
        logits = model(input_ids=ids).logits
        convert_(model)
        assert sqnr(logits, model(input_ids=ids).logits) > 90


def test_modules_stay_what_they_are() -> None:
    model = nn.Sequential(nn.Linear(K, N))
    prepare_(model, "int8")
    assert type(model[0]) is nn.Linear
