"""Linear layers in training: forward like the quantized model, backward against float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bitport.errors import ArgumentError
from bitport.numerics import ACTIVATIONS, Format, fake_quantize, quantize_dequantize, sqnr
from bitport.ops.samples import product_budget
from bitport.schemes import PRESETS, Scheme, preset
from bitport.tensor import quantize_tensor
from bitport.train import GRADIENTS, Gradients, convert_, prepare_
from bitport.train.tensor import Rounding, TrainedTensor

DYNAMIC = [name for name, scheme in PRESETS.items() if not scheme.static]
M, N, K = 24, 80, 160


def weight(scheme: Scheme, dtype: torch.dtype = torch.float32, gradients: Gradients | None = None) -> TrainedTensor:
    made = TrainedTensor(torch.randn(N, K).to(dtype), Rounding(scheme, gradients))
    made.requires_grad_()
    return made


def step(w: TrainedTensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return x and y with gradients, and the output gradient."""
    x = torch.randn(M, K).to(dtype).requires_grad_()
    y = F.linear(x, w)
    g = torch.randn(M, N).to(dtype)
    y.backward(g)
    return x, y, g


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", DYNAMIC)
def test_forward_is_the_quantized_product(name: str, dtype: torch.dtype) -> None:
    w = weight(preset(name), dtype)
    x, y, _ = step(w, dtype)
    assert torch.equal(y, F.linear(x.detach(), quantize_tensor(w.value, name)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", DYNAMIC)
def test_gradients_pass_straight_through(name: str, dtype: torch.dtype) -> None:
    """gx = g rounded(W) and gw = g^T rounded(x), in float64 from factors in the dtype of the gradient."""
    scheme = preset(name)
    w = weight(scheme, dtype)
    x, _, g = step(w, dtype)
    rounded_w = quantize_tensor(w.value, scheme).dequantize(dtype).double()
    rounded_x = (fake_quantize(x, scheme.act).to(dtype) if scheme.act else x.detach()).double()
    assert x.grad is not None
    assert w.grad is not None
    assert type(w.grad) is Tensor
    assert (x.grad.dtype, w.grad.dtype) == (dtype, dtype)
    assert sqnr(g.double() @ rounded_w, x.grad.double()) > product_budget(dtype, N, M * K)
    assert sqnr(g.double().t() @ rounded_x, w.grad.double()) > product_budget(dtype, M, N * K)


@pytest.mark.parametrize("name", ["int4", "int8-dyn", "nf4"])
def test_results_may_be_written_into(name: str) -> None:
    """For non-contiguous rows the float32 product is a view."""
    w, x = weight(preset(name)), torch.randn(3, 4, K).transpose(0, 1)
    y = F.linear(x, w)
    right = F.relu(y.detach())
    assert torch.equal(y.relu_(), right)
    y.sum().backward()
    assert w.grad is not None


def rounded(x: Tensor, fmt: Format) -> Tensor:
    return quantize_dequantize(x, fmt).double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", GRADIENTS)
def test_rounded_gradients(name: str, dtype: torch.dtype) -> None:
    """Both factors of each backward product are rounded along the summed axis."""
    how = GRADIENTS[name]
    scheme = preset({"int8": "int8-dyn", "int8-input": "int8-dyn", "fp8-row-input": "fp8-row"}.get(name, name))
    w = weight(scheme, dtype, how)
    x, _, g = step(w, dtype)
    assert x.grad is not None
    assert w.grad is not None
    assert how.input is not None
    left, right = rounded(g, ACTIVATIONS[how.input.act]), rounded(w.value.t(), how.input.weight)
    assert sqnr(left @ right.t(), x.grad.double()) > product_budget(dtype, N, M * K)
    if how.weight is None:
        want = g.double().t() @ fake_quantize(x, scheme.act).to(dtype).double()
    else:
        want = rounded(g.t(), ACTIVATIONS[how.weight.act]) @ rounded(x.detach().t(), how.weight.weight).t()
    assert sqnr(want, w.grad.double()) > product_budget(dtype, M, N * K)


@pytest.mark.parametrize("name", DYNAMIC)
def test_no_rows(name: str) -> None:
    """Such as an expert that no token chose."""
    w = weight(preset(name))
    x = torch.randn(0, K, requires_grad=True)
    F.linear(x, w).sum().backward()
    assert w.grad is not None
    assert x.grad is not None
    assert not w.grad.any()


def test_rounding_a_gradient_changes_it() -> None:
    """The budgets above would also hold for unrounded gradients if the formats were exact."""
    plain, low = weight(preset("int8-dyn")), weight(preset("int8-dyn"), gradients=GRADIENTS["int8"])
    low.value.copy_(plain.value)
    x, g = torch.randn(M, K), torch.randn(M, N)
    for w in (plain, low):
        F.linear(x, w).backward(g)
    assert plain.grad is not None
    assert low.grad is not None
    assert 30 < sqnr(plain.grad, low.grad) < 50


def test_a_gradient_with_far_magnitudes_keeps_its_small_rows() -> None:
    """e5m2 reaches 2^-16 / 57344, e4m3 2^-9 / 448: a row 2^-20 below the largest is lost only in the latter."""
    lost = []
    for name in ("fp8", "fp8-tensor"):
        how = GRADIENTS["fp8"] if name == "fp8" else Gradients(preset("fp8"), preset("fp8"))
        w = weight(preset("fp8"), gradients=how)
        x = torch.randn(M, K, requires_grad=True)
        g = torch.randn(M, N)
        g[3] *= 2.0**-20
        F.linear(x, w).backward(g)
        assert x.grad is not None
        lost.append(not bool(x.grad[3].any()))
    assert lost == [False, True]


def test_bias_and_leading_dimensions() -> None:
    w, bias = weight(preset("int4-g32")), torch.randn(N, requires_grad=True)
    x = torch.randn(2, 3, K, requires_grad=True)
    g = torch.randn(2, 3, N)
    F.linear(x, w, bias).backward(g)
    assert x.grad is not None
    assert bias.grad is not None
    assert x.grad.shape == x.shape
    assert torch.allclose(bias.grad, g.sum((0, 1)))
    single = F.linear(x.detach()[0, 0], w, bias.detach())
    assert single.shape == (N,)
    assert F.linear(torch.empty(0, K), w).shape == (0, N)


def test_a_bias_in_float32_of_a_product_in_bfloat16() -> None:
    bias, g = torch.zeros(N, requires_grad=True), torch.randn(M, N).bfloat16()
    F.linear(torch.randn(M, K).bfloat16(), weight(preset("int8"), torch.bfloat16), bias).backward(g)
    assert bias.grad is not None
    assert bool(((bias.grad - g.double().sum(0)).abs() <= M * 2.0**-24 * g.double().abs().sum(0)).all())


def test_only_what_is_wanted_is_worked_out() -> None:
    frozen = weight(preset("int8"))
    frozen.requires_grad_(False)
    x = torch.randn(M, K, requires_grad=True)
    F.linear(x, frozen).sum().backward()
    assert frozen.grad is None
    assert x.grad is not None
    w = weight(preset("int8"))
    F.linear(torch.randn(M, K), w).sum().backward()
    assert w.grad is not None


def test_gradients_add_up_over_steps() -> None:
    w = weight(preset("int4-g32"))
    x = torch.randn(M, K)
    F.linear(x, w).sum().backward()
    assert w.grad is not None
    once = w.grad.clone()
    F.linear(x, w).sum().backward()
    assert torch.equal(w.grad, 2 * once)


def test_autocast_multiplies_in_its_dtype_and_trains_in_float32() -> None:
    w = weight(preset("int4-g32"))
    x = torch.randn(M, K, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(x, w)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, F.linear(x.detach().bfloat16(), quantize_tensor(w.value, "int4-g32")))
    y.float().sum().backward()
    assert w.grad is not None
    assert (w.grad.dtype, x.grad.dtype) == (torch.float32, torch.float32)  # type: ignore[union-attr]


def test_a_weight_that_was_changed_before_backward() -> None:
    """The gradient is that of the codes that were used; if the floats are needed again, it is an error."""
    x, g = torch.randn(M, K, requires_grad=True), torch.randn(M, N)
    grads = []
    for factor in (1, 2):
        w = weight(preset("int8"))
        w.value.copy_(torch.linspace(-1, 1, N * K).reshape(N, K))
        y = F.linear(x, w)
        with torch.no_grad():
            w.mul_(factor)
        grads += torch.autograd.grad(y, x, g)
    assert torch.equal(*grads)
    w = weight(preset("int8-dyn"), gradients=GRADIENTS["int8"])
    y = F.linear(x, w)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(("scheme", "gradients"), [("int4-g32", None), ("int8-dyn", "int8")])
def test_what_is_kept_for_backward_may_lie_elsewhere(scheme: str, gradients: str | None) -> None:
    """Checkpointing recomputes it and save_on_cpu moves it: the gradients are the same."""
    model = nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, 32))
    prepare_(model, scheme, gradients=gradients)
    x = torch.randn(M, K, requires_grad=True)

    def moved(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return model(x)

    found = []
    for forward in (model, partial(checkpoint, model, use_reentrant=False), moved):
        forward(x).square().sum().backward()
        found.append([param.grad for param in (x, *model.parameters())])
        model.zero_grad()
        x.grad = None
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.jacrev, torch.func.jacfwd])
def test_function_transforms_are_refused(transform: Callable[..., Callable[[Tensor], Tensor]]) -> None:
    w = weight(preset("int8"))
    with pytest.raises(ArgumentError, match=r"torch.func and torch.vmap cannot transform .* release_\(model\)"):
        transform(lambda x: F.linear(x, w))(torch.randn(M, K))


@pytest.mark.parametrize("name", ["int4-g32", "int8-dyn"])
def test_a_decoder_tied_to_its_encoder(name: str) -> None:
    """y = x rounded(W) + b and gw = x^T g, in float64: this product sums over rows of W, and rounds no input."""
    w, x, bias, g = weight(preset(name)), torch.randn(M, N), torch.randn(K), torch.randn(M, K)
    y = F.linear(x, w.t(), bias)
    y.backward(g)
    wanted = x.double() @ quantize_tensor(w.value, name).dequantize().double() + bias.double()
    assert w.grad is not None
    assert sqnr(wanted, y.detach().double()) > product_budget(torch.float32, N, M * K)
    assert sqnr(x.double().t() @ g.double(), w.grad.double()) > product_budget(torch.float32, M, N * K)


def test_what_is_no_linear_layer() -> None:
    w = weight(preset("int8"))
    with pytest.raises(ArgumentError, match="not as its input"):
        F.linear(w, torch.randn(4, K))
    experts = TrainedTensor(torch.randn(3, N, K), Rounding(preset("int8")))
    for stack in (experts, experts.mT):
        with pytest.raises(ArgumentError, match=r"wants a weight \[N, K\]; this weight in training has shape \[3, "):
            F.linear(torch.randn(3, M, stack.shape[-1]), stack)


@pytest.mark.parametrize(
    ("scheme", "gradients"), [("int4-g32", None), ("int8-dyn", "int8"), ("fp8", "fp8"), ("mxfp8", "mxfp8")]
)
def test_compiled_as_in_eager_mode(scheme: str, gradients: str | None) -> None:
    """A single graph, the same results, and other numbers of rows without an error."""
    model = nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, 32))
    prepare_(model, scheme, gradients=gradients)
    torch.compiler.reset()
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True)
    for rows in (M, 7, 31):
        x = torch.randn(rows, K)
        results = []
        for each in (model, compiled):
            each.zero_grad()
            y = each(x)
            y.square().sum().backward()
            results.append((y.detach(), [param.grad for param in each.parameters()]))
        (y, grads), (y_compiled, grads_compiled) = results
        assert torch.allclose(y, y_compiled, rtol=1e-5, atol=1e-5)
        for grad, grad_compiled in zip(grads, grads_compiled, strict=True):
            assert sqnr(grad, grad_compiled) > 80


def test_training_lowers_the_loss_of_the_quantized_model() -> None:
    """A 2-bit student learns from a teacher; the baseline without training is the rounded teacher."""
    teacher = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    x = torch.randn(512, 32)
    want = teacher(x).detach()
    student = copy.deepcopy(teacher)
    prepare_(student, "int2-g16")
    untrained = copy.deepcopy(student)
    convert_(untrained)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2, weight_decay=0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    for _ in range(200):
        optimizer.zero_grad()
        F.mse_loss(student(x), want).backward()
        optimizer.step()
        schedule.step()
    trained_loss = F.mse_loss(student(x), want)
    convert_(student)
    assert torch.equal(F.mse_loss(student(x), want), trained_loss)
    assert trained_loss < 0.6 * F.mse_loss(untrained(x), want)
