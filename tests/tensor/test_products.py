"""Every product that PyTorch can form with a weight, against the float64 product with the dequantized matrix.

The reference rounds the input by the scheme with the op quantize_input, and decodes it with the independent reference.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from bitport.errors import ArgumentError, UnsupportedError
from bitport.numerics import ACTIVATIONS, sqnr
from bitport.ops import OPS
from bitport.ops.convert import from_list
from bitport.ops.product import linear_then, operand
from bitport.ops.reference import value_of
from bitport.ops.samples import product_budget
from bitport.schemes import PRESETS
from bitport.tensor import QTensor

Make = Callable[..., QTensor]


def rounded(x: Tensor, q: QTensor) -> Tensor:
    """The input after rounding, in float64."""
    if not q.scheme.act:
        return x.double()
    m, k = x.numel() // x.shape[-1], x.shape[-1]
    fmt = ACTIVATIONS[q.scheme.act]
    parts = from_list(OPS["quantize_input"].overload(x, q.scheme.act, q.act_scale))
    return value_of(parts, fmt.dtype, m, k, *fmt.block_shape(m, k)).reshape(x.shape)


def exact(q: QTensor) -> Tensor:
    return value_of(q.plain(), *q.matrix)


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w: F.linear(x, w),
    "linear-keywords": lambda x, w: F.linear(input=x, weight=w, bias=None),
    "matmul-t": lambda x, w: x @ w.t(),
    "matmul-T": lambda x, w: torch.matmul(x, w.T),
    "matmul-keywords": lambda x, w: torch.matmul(input=x, other=w.mT),
    "method": lambda x, w: x.matmul(w.t()),
    "mm": lambda x, w: torch.mm(x, w.t()),
    "addmm": lambda x, w: torch.addmm(torch.zeros(64), x, w.t()),
    "inner": lambda x, w: torch.inner(x, w),
    "linear-in-inference-mode": torch.inference_mode()(lambda x, w: F.linear(x, w)),
    "matmul-in-inference-mode": torch.inference_mode()(lambda x, w: x @ w.t()),
}


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("scheme", PRESETS)
def test_every_product_of_every_scheme(make: Make, scheme: str, product: str) -> None:
    q = make(scheme, 64, 96, act_scale=torch.tensor([[0.03]]) if PRESETS[scheme].static else None)
    x = torch.randn(5, 96)
    y = PRODUCTS[product](x, q)
    wanted = rounded(x, q) @ exact(q).T
    assert float(sqnr(wanted, y)) >= product_budget(torch.float32, 96, 5 * 64)


@torch.inference_mode()
def test_slices_in_inference_mode(make: Make) -> None:
    """MultiheadAttention and fused projections slice their weight on every call."""
    with torch.inference_mode(False):
        q = make("int4-g32")
    x = torch.randn(5, 96)
    for parts in (q.chunk(4), q.split([24, 40]), (q[:10], q[10:])):
        torch.testing.assert_close(torch.cat([F.linear(x, part) for part in parts], -1), F.linear(x, q))
    assert torch.equal(q.half().t()[:32].dequantize(), q.half().dequantize().t()[:32])


def test_bias_and_factors(make: Make) -> None:
    q, x, bias = make("int4-g32"), torch.randn(5, 96), torch.randn(64)
    wanted = x.double() @ exact(q).T
    torch.testing.assert_close(F.linear(x, q, bias).double(), wanted + bias, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.addmm(bias, x, q.t()).double(), wanted + bias, rtol=1e-5, atol=1e-5)
    scaled = torch.addmm(bias, x, q.t(), beta=0.5, alpha=2.0)
    torch.testing.assert_close(scaled.double(), 2 * wanted + 0.5 * bias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(96,), (1, 96), (2, 3, 96), (2, 1, 3, 96), (0, 96), (2, 0, 96)], ids=str)
def test_every_rank_of_input(make: Make, shape: tuple[int, ...]) -> None:
    q, x = make("int4-g32"), torch.randn(shape)
    for y in (F.linear(x, q), x @ q.t()):
        assert y.shape == (*shape[:-1], 64)
        torch.testing.assert_close(y, x @ q.dequantize().t(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scheme", ["int4-g32", "int8-dyn"])
@pytest.mark.parametrize(
    ("shape", "batch"),
    [((96,), (4,)), ((5, 96), (4,)), ((4, 5, 96), (4,)), ((4, 5, 96), (1,)), ((3, 1, 5, 96), (2,)), ((5, 96), (1, 2))],
    ids=str,
)
def test_a_matrix_repeated_over_a_batch(
    make: Make, scheme: str, shape: tuple[int, ...], batch: tuple[int, ...]
) -> None:
    q, x = make(scheme), torch.randn(shape)
    y, rows = x @ q.t().expand(*batch, 96, 64), rounded(x, q)
    wanted = rows @ exact(q).t().expand(*batch, 96, 64)
    assert y.shape == wanted.shape
    assert float(sqnr(wanted, y)) >= product_budget(torch.float32, 96, rows.numel() // 96 * 64)


def test_experts(make: Make) -> None:
    q, x = make("int4-g32", 3, 64, 96), torch.randn(3, 5, 96)
    wanted = x.double() @ exact(q).transpose(1, 2)
    for y in (torch.bmm(x, q.transpose(1, 2)), x @ q.mT, torch.stack([F.linear(x[e], q[e]) for e in range(3)])):
        torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)
    added = torch.randn(3, 1, 64)
    for y in (
        torch.baddbmm(added, x, q.mT, beta=2, alpha=3),
        torch.baddbmm(added, batch1=x, batch2=q.mT, beta=2, alpha=3),
        (2 * added).baddbmm(x, q.mT, alpha=3),
    ):
        torch.testing.assert_close(y.double(), 2 * added.double() + 3 * wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scheme", ["int4-g32", "int8-dyn", "fp8-row", "mxfp4"])
def test_grouped(make: Make, scheme: str) -> None:
    q, x = make(scheme, 3, 64, 96), torch.randn(8, 96)
    ends = torch.tensor([2, 2, 7], dtype=torch.int32)
    y = F.grouped_mm(x, q.transpose(1, 2), offs=ends)
    weight, rows = exact(q), rounded(x, q)
    wanted = torch.cat([rows[:2] @ weight[0].T, rows[2:7] @ weight[2].T])
    assert float(sqnr(wanted, y[:7])) >= product_budget(torch.float32, 96, 7 * 64)
    assert not y[7:].any()


def test_experts_round_their_input_in_bmm_too(make: Make) -> None:
    q, x = make("int8-dyn", 2, 64, 96), torch.randn(2, 5, 96)
    ends = torch.tensor([5, 10], dtype=torch.int32)
    grouped = F.grouped_mm(x.reshape(10, 96), q.mT, offs=ends).reshape(2, 5, 64)
    torch.testing.assert_close(torch.bmm(x, q.mT), grouped, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scheme", ["int8-dyn", "mxfp8"])
def test_experts_smooth_their_input_before_they_round_it(make: Make, scheme: str) -> None:
    scale = torch.logspace(-2, 2, 96)
    q, x = make(scheme, 2, 64, 96, pre_scale=scale), torch.randn(2, 5, 96) / scale
    wanted = torch.stack([rounded(x[e] * scale, q) @ exact(q)[e].T for e in range(2)])
    assert float(sqnr(wanted, torch.bmm(x, q.mT))) >= product_budget(torch.float32, 96, 10 * 64)


@pytest.mark.parametrize("scheme", ["int8-static", "fp8-static", "nvfp4-static"])
def test_experts_use_a_fixed_scale(make: Make, scheme: str) -> None:
    q, x = make(scheme, 2, 64, 96, act_scale=torch.tensor([[0.01]])), torch.randn(10, 96, requires_grad=True)
    ends = torch.tensor([5, 10], dtype=torch.int32)
    wanted = torch.cat([rounded(x[:5].detach(), q) @ exact(q)[0].T, rounded(x[5:].detach(), q) @ exact(q)[1].T])
    grouped = F.grouped_mm(x, q.mT, offs=ends)
    for y in (grouped, torch.bmm(x.detach().view(2, 5, 96), q.mT).view(10, 64)):
        assert float(sqnr(wanted, y)) >= product_budget(torch.float32, 96, 10 * 64)
    grouped.sum().backward()
    gradient = exact(q).sum(1).repeat_interleave(5, 0)
    assert x.grad is not None
    assert float(sqnr(gradient, x.grad)) >= product_budget(torch.float32, 64, 10 * 96)


@pytest.mark.parametrize("scheme", ["int8", "int4-g32", "nf4"])
def test_embedding(make: Make, scheme: str) -> None:
    q, ids = make(scheme), torch.tensor([[3, 0], [63, 3]])
    assert torch.equal(F.embedding(ids, q), q.dequantize()[ids])
    assert F.embedding(ids, q.half()).dtype == torch.float16
    assert torch.equal(F.embedding(ids, q, padding_idx=0), q.dequantize()[ids])
    with pytest.raises(ArgumentError, match="max_norm"):
        F.embedding(ids, q, max_norm=1.0)
    with pytest.raises(ArgumentError, match=r"rows are float32, bfloat16 or float16, not torch.float64"):
        F.embedding(ids, q.double())
    with pytest.raises(ArgumentError, match=r"transposed view \[K, N\]"):
        F.embedding(ids, q.t())


@pytest.mark.parametrize("layout", ["plain", "cpu_tiles"])
def test_ids_that_a_table_does_not_have(make: Make, layout: str) -> None:
    """A negative index counts from the end; a negative id is an error."""
    q = make("int4-g32").to_layout(layout)
    ids = torch.tensor([[-1, 0], [-64, 63]])
    assert torch.equal(q[ids], q.dequantize()[ids])
    for wrong in (-1, 64):
        with pytest.raises(IndexError):
            F.embedding(torch.tensor([0, wrong]), q)
    for wrong in (-65, 64):
        with pytest.raises(IndexError):
            q[torch.tensor([0, wrong])]
    for index in ([1, -2], torch.arange(64) % 3 == 0, (torch.tensor([5]), slice(None))):
        assert torch.equal(q[index], q.dequantize()[index])
    for wrong in ([64], torch.ones(63, dtype=torch.bool), torch.ones(64, 96, dtype=torch.bool)):
        with pytest.raises(IndexError):
            q[wrong]


def test_convolutions(make: Make) -> None:
    q, x = make("int8", 8, 4, 3, 3, kind="conv"), torch.randn(2, 4, 9, 9)
    dense = q.dequantize()
    assert torch.equal(F.conv2d(x, q, stride=2, padding=1), F.conv2d(x, dense, stride=2, padding=1))
    assert torch.equal(F.conv2d(input=torch.randn(1, 8, 5, 5).zero_(), weight=q, groups=2), torch.zeros(1, 8, 3, 3))
    one, y = make("int4-g32", 8, 4, 3, kind="conv"), torch.randn(2, 4, 9)
    assert torch.equal(F.conv1d(y, one, dilation=2), F.conv1d(y, one.dequantize(), dilation=2))


def test_kernels_of_a_convolution_channel_by_channel(make: Make) -> None:
    """As state-space models pass them to functions of their own that read memory."""
    q = make("int8", 64, 1, 4, kind="conv")
    kernels = q.squeeze(1)
    assert type(kernels) is Tensor
    assert torch.equal(kernels, q.dequantize()[:, 0])
    with pytest.raises(NotImplementedError, match=r"aten\.squeeze\.dim is not defined on a QTensor"):
        make("int8").squeeze(0)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("kind", ["conv", "conv_transpose"])
def test_convolutions_have_a_gradient(make: Make, kind: str, rank: int) -> None:
    convolve = getattr(F, f"{kind}{rank}d")
    q = make("int8", 8, 4, *[3] * rank, kind="conv")
    x = torch.randn(2, 4 if kind == "conv" else 8, *[5] * rank, requires_grad=True)
    for weight in (q, nn.Parameter(q)):
        y, wanted = convolve(x, weight, stride=2), convolve(x, q.dequantize(), stride=2)
        assert torch.equal(y, wanted)
        gradient, right = (torch.autograd.grad(each.square().sum(), x)[0] for each in (y, wanted))
        assert torch.equal(gradient, right)


# -- what stands between the input and the codes ---------------------------------------------------------------------


@pytest.mark.parametrize("parts", [("perm",), ("pre_scale",), ("perm", "pre_scale")], ids="-".join)
def test_perm_and_pre_scale_are_invisible_in_the_value(make: Make, parts: tuple[str, ...]) -> None:
    """dequantize() is the matrix in the original order and scale, and every product is the product with it."""
    extra = {"perm": torch.randperm(96), "pre_scale": torch.rand(96) + 0.5}
    q = make("int4-g32", **{name: extra[name] for name in parts})
    codes = exact(q)
    value = codes.clone()
    if "perm" in parts:
        value[:, extra["perm"]] = codes
    if "pre_scale" in parts:
        value = value * extra["pre_scale"].double()
    torch.testing.assert_close(q.dequantize().double(), value, rtol=1e-6, atol=1e-7)
    assert q.dequantize(torch.bfloat16).dtype == torch.bfloat16
    x, ids = torch.randn(5, 96), torch.tensor([3, 60])
    for y in (F.linear(x, q), x @ q.t(), torch.addmm(torch.zeros(64), x, q.T)):
        torch.testing.assert_close(y.double(), x.double() @ value.T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(F.embedding(ids, q).double(), value[ids], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(torch.randn(2, 64).zero_() @ q, torch.zeros(2, 96))


def test_a_pre_scale_comes_before_the_rounding_of_the_input(make: Make) -> None:
    """SmoothQuant: what is rounded to int8 is x times the scale."""
    scale = torch.logspace(-2, 2, 96)
    q = make("int8-dyn", pre_scale=scale)
    x = torch.randn(5, 96) / scale
    wanted = rounded(x * scale, q) @ exact(q).T
    assert float(sqnr(wanted, F.linear(x, q))) >= product_budget(torch.float32, 96, 5 * 64)


def test_a_static_scale_must_be_there(make: Make) -> None:
    one, experts, ends = make("int8-static"), make("int8-static", 2, 64, 96).mT, torch.tensor([1, 3]).int()
    for product in (
        lambda x: F.linear(x, one),
        lambda x: linear_then(x, one, None, "silu"),
        lambda x: x @ experts,
        lambda x: F.grouped_mm(x, experts, offs=ends),
    ):
        with pytest.raises(ArgumentError, match="none was calibrated: quantize_"):
            product(torch.randn(3, 96))


# -- autocast, autograd and functional transforms --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_autocast(make: Make, dtype: torch.dtype) -> None:
    q, x, bias = make("int4-g32"), torch.randn(5, 96), torch.randn(64)
    with torch.autocast("cpu", dtype=dtype):
        y, z, added = F.linear(x, q, bias), x @ q.t(), torch.addmm(bias, x, q.t())
    assert y.dtype == z.dtype == added.dtype == dtype
    assert torch.equal(y, F.linear(x.to(dtype), q, bias))
    assert F.linear(x, q).dtype == torch.float32


@pytest.mark.parametrize("scheme", ["int4-g32", "int8-dyn"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.complex64], ids=str)
def test_autocast_casts_what_torch_casts(make: Make, scheme: str, dtype: torch.dtype) -> None:
    """Autocast skips float64 and non-floats: casting complex numbers would lose the imaginary part."""
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ArgumentError, match=f"x must be float32, bfloat16 or float16, not {dtype}"),
    ):
        F.linear(torch.ones(3, 96).to(dtype), make(scheme))


def test_gradients_pass_through_a_chain(make: Make) -> None:
    first, second, x = make("int4-g32", 64, 96), make("int8-dyn", 32, 64), torch.randn(5, 96, requires_grad=True)
    F.linear(F.relu(F.linear(x, first)), second).sum().backward()
    inside = (x.double() @ exact(first).T > 0).double()
    wanted = (inside * exact(second).sum(0)) @ exact(first)
    torch.testing.assert_close(x.grad.double(), wanted, rtol=1e-4, atol=1e-4)


def test_checkpointing(make: Make) -> None:
    q, x = make("int4-g32"), torch.randn(5, 96, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(lambda z: F.linear(z, q), x, use_reentrant=False)
    y.sum().backward()
    torch.testing.assert_close(x.grad, q.dequantize().sum(0).expand(5, -1), rtol=1e-5, atol=1e-5)


def test_functional_transforms(make: Make) -> None:
    """torch.func gives the right derivative; a zero tangent would be silently wrong."""
    q, x, v = make("int4-g32"), torch.randn(96), torch.randn(96)
    dense = q.dequantize()
    torch.testing.assert_close(torch.func.grad(lambda z: F.linear(z, q).sum())(x), dense.sum(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.func.jacrev(lambda z: F.linear(z, q))(x), dense, rtol=1e-5, atol=1e-5)
    _, tangent = torch.func.jvp(lambda z: F.linear(z, q), (x,), (v,))
    torch.testing.assert_close(tangent, dense @ v, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("inside", [False, True], ids=["view-made-before", "view-made-inside"])
def test_functional_transforms_of_a_square_view(make: Make, inside: bool) -> None:
    """Derivatives through a transposed view: with N = K, even the wrong orientation has a valid shape."""
    q, x, v = make("int4-g32", 64, 64), torch.randn(5, 64), torch.randn(5, 64)
    dense, view = exact(q), q.t()
    apart = torch.randn(2, 64, 7).transpose(1, 2)  # torch.matmul expands the view for it

    def product(z: Tensor) -> Tensor:
        return z @ (q.t() if inside else view)

    _, tangent = torch.func.jvp(product, (x,), (v,))
    torch.testing.assert_close(tangent.double(), v.double() @ dense.T, rtol=1e-5, atol=1e-5)
    for z in (x, apart):
        gradient = torch.func.grad(lambda z: product(z).square().sum())(z)
        torch.testing.assert_close(gradient.double(), 2 * (z.double() @ dense.T) @ dense, rtol=1e-4, atol=1e-4)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, v)
        for y in (product(dual), torch.inner(dual, q), torch.addmm(torch.ones(64), dual, view)):
            tangent = forward_ad.unpack_dual(y).tangent
            torch.testing.assert_close(tangent.double(), v.double() @ dense.T, rtol=1e-5, atol=1e-5)


def test_functional_transforms_of_a_rounded_input_are_refused(make: Make) -> None:
    q, x = make("int8-dyn"), torch.randn(96)
    with pytest.raises(ArgumentError, match=r"torch\.func cannot differentiate int8-dyn.*use autograd"):
        torch.func.jvp(lambda z: F.linear(z, q), (x,), (x,))
    with pytest.raises(ArgumentError, match=r"torch\.func cannot differentiate"):
        torch.func.grad(lambda z: F.linear(z, q).sum())(x)
    with pytest.raises(ArgumentError, match=r"torch\.func cannot differentiate"):
        torch.func.jvp(lambda z: z @ q.t(), (x,), (x,))


@pytest.mark.parametrize("learned", [False, True], ids=["frozen-bias", "learned-bias"])
@pytest.mark.parametrize("call", ["linear", "linear_then"])
def test_forward_mode(make: Make, call: str, learned: bool) -> None:
    """A missing tangent would silently count as zero."""
    q, x, v, bias = make("int4-g32"), torch.randn(5, 96), torch.randn(5, 96), torch.randn(64, requires_grad=learned)
    wanted = v.double() @ exact(q).T
    if call == "linear_then":
        z = x.double() @ exact(q).T + bias.detach().double()
        wanted = wanted * torch.func.vmap(torch.func.vmap(torch.func.grad(F.silu)))(z)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, v)
        y = F.linear(dual, q, bias) if call == "linear" else linear_then(dual, q, bias, "silu")
        tangent = forward_ad.unpack_dual(y).tangent
    torch.testing.assert_close(tangent.double(), wanted, rtol=1e-5, atol=1e-5)


def test_forward_mode_that_a_kernel_does_not_have_is_refused(make: Make) -> None:
    x = torch.randn(5, 96)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        with pytest.raises(ArgumentError, match=r"rounds its input, nor can forward-mode AD"):
            F.linear(dual, make("int8-dyn"))
        with pytest.raises(ArgumentError, match=r"rounds its input, nor can forward-mode AD"):
            torch.inner(dual, make("int8-dyn"))
        with pytest.raises(NotImplementedError, match=r"bitport::linear has no forward-mode derivative"):
            OPS["linear"].overload(dual, *operand(make("int8")), None)


def test_forward_mode_of_experts_is_refused(make: Make) -> None:
    """Rounding the input before the product drops the tangent, which would count as zero."""
    x, ends = torch.randn(2, 5, 96), torch.tensor([5, 10], dtype=torch.int32)
    static = make("int8-static", 2, 64, 96, act_scale=torch.tensor([[0.01]])).mT
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        for experts in (static, make("int8-dyn", 2, 64, 96).mT):
            with pytest.raises(ArgumentError, match="rounds its input, has no derivative"):
                torch.bmm(dual, experts)
            with pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
                F.grouped_mm(dual.view(10, 96), experts, offs=ends)


def test_vmap(make: Make) -> None:
    q, x = make("int4-g32"), torch.randn(4, 5, 96)
    torch.testing.assert_close(torch.vmap(lambda z: F.linear(z, q))(x), F.linear(x, q))
    with torch._C.DisableTorchFunctionSubclass():  # as inside functions of torch, such as its attention
        y = torch.vmap(lambda z: F.linear(z.transpose(0, 1), q))(x.view(2, 2, 5, 96))
    torch.testing.assert_close(y, F.linear(x.view(2, 2, 5, 96).transpose(1, 2), q))


# -- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("product", "message"),
    [
        pytest.param(
            lambda q: F.linear(q, torch.randn(64, 96)), "as its weight only", id="linear-of-a-quantized-input"
        ),
        pytest.param(
            lambda q: F.conv1d(q, torch.randn(8, 64, 3)), "as its weight only", id="convolution-of-a-quantized-input"
        ),
        pytest.param(
            lambda q: torch.mm(torch.randn(2, 3, 96), q.t()), r"mm takes two 2-D tensors, not \[2, 3, 96\]", id="mm-3d"
        ),
        pytest.param(
            lambda q: F.linear(torch.randn(3, 96), q.expand(2, 64, 96)), r"wants .*\[2, 64, 96\]", id="linear-3d"
        ),
        pytest.param(
            lambda q: torch.addmm(torch.zeros(5, 3, 64), torch.randn(3, 96), q.t()),
            r"addmm adds to a product torch.float32 \[3, 64\] .*, not torch.float32 \[5, 3, 64\]",
            id="addmm-of-a-stack",
        ),
        pytest.param(
            lambda q: torch.addmm(torch.zeros(64), torch.randn(3, 96).bfloat16(), q.t()),
            r"torch.bfloat16 \[3, 64\] .*, not torch.float32 \[64\]",
            id="addmm-of-another-dtype",
        ),
        pytest.param(
            lambda q: torch.einsum("bi,oi->bo", torch.randn(3, 96), q),
            r"einsum does not take .* in 'bi,oi->bo': use F\.linear",
            id="einsum",
        ),
        pytest.param(lambda q: torch.bmm(torch.randn(3, 96), q.t()), "bmm takes two 3-D tensors", id="bmm-2d"),
        pytest.param(
            lambda q: torch.bmm(torch.randn(2, 3, 96), q.t().expand(4, 96, 64)),
            "the same number of matrices",
            id="bmm-counts",
        ),
        pytest.param(lambda q: torch.mv(q, torch.randn(96, 2)), r"not \[64, 96\] and \[96, 2\]", id="mv-2d"),
        pytest.param(lambda q: F.linear(torch.randn(3, 95), q), r"\[..., 96\].*not \[3, 95\]", id="columns"),
        pytest.param(
            lambda q: F.linear(torch.randn(3, 96, device="meta"), q), "x is on meta, the weight on cpu", id="device"
        ),
        pytest.param(lambda q: F.grouped_mm(torch.randn(3, 96), q.t()), "offs", id="grouped-without-ends"),
    ],
)
def test_refused_products(make: Make, product: Callable[[QTensor], Tensor], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        product(make("int4-g32"))


UNKNOWN: dict[str, Callable[[QTensor], object]] = {
    "add": lambda q: q + 1,
    "add_": lambda q: q.add_(1),
    "mul": lambda q: 2 * q,
    "sum": lambda q: q.sum(),
    "abs": lambda q: q.abs(),
    "norm": lambda q: q.norm(),
    "eq": lambda q: q == q,
    "stack": lambda q: torch.stack([q, q]),
    "zero_": lambda q: q.zero_(),
    "normal_": lambda q: torch.nn.init.normal_(q),
    "view-dtype": lambda q: q.view(torch.int8),
    "addmm_": lambda q: q.addmm_(torch.randn(64, 4), torch.randn(4, 96)),
    "addmv": lambda q: torch.addmv(torch.zeros(64), q, torch.randn(96)),
}


def test_a_function_is_applied_to_no_numbers(make: Make) -> None:
    """torch's own apply_ would read memory that does not exist."""
    with pytest.raises(NotImplementedError, match=r"Tensor.apply_ is not defined on a QTensor.*\.dequantize\(\)"):
        make("int4-g32").apply_(abs)


@pytest.mark.parametrize("op", UNKNOWN)
def test_what_it_does_not_stand_for(make: Make, op: str) -> None:
    """The error tells which weight it is by its scheme and shape."""
    said = r"aten\.\w+.* is not defined on a QTensor \(int4-g32, \[64, 96\]\).*\.dequantize\(\)"
    with pytest.raises(UnsupportedError, match=said) as caught:
        UNKNOWN[op](make("int4-g32"))
    assert isinstance(caught.value, NotImplementedError)


def test_a_weight_of_a_convolution_is_none_of_a_linear_layer(make: Make) -> None:
    q = make("int8", 64, 24, 2, 2, kind="conv")
    for product in (F.linear, lambda x, w: linear_then(x, w, None, "silu")):
        with pytest.raises(ArgumentError, match=r"wants a weight \[N, K\]; this QTensor has shape \[64, 24, 2, 2\]"):
            product(torch.randn(3, 96), q)
