"""TrainedTensor: stored and moved like a weight, updated like a float tensor, multiplied as its quantized numbers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitport.errors import ArgumentError
from bitport.numerics import fake_quantize, sqnr
from bitport.ops.samples import product_budget
from bitport.schemes import preset
from bitport.tensor import quantize_tensor
from bitport.train import TrainedTensor
from bitport.train.tensor import Rounding


def trained(*shape: int, scheme: str = "int4-g32", **how: object) -> nn.Parameter:
    return nn.Parameter(TrainedTensor(torch.randn(*shape), Rounding(preset(scheme), **how)))  # type: ignore[arg-type]


OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "adam-amsgrad": lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd-foreach": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True, maximize=True),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1, momentum=0.5),
    "muon": lambda params: torch.optim.Muon(params, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_update_the_float_values(name: str) -> None:
    param = trained(32, 64)
    plain = nn.Parameter(param.value.clone())  # type: ignore[attr-defined]
    ours, theirs = OPTIMIZERS[name]([param]), OPTIMIZERS[name]([plain])
    for _ in range(3):
        grad = torch.randn(32, 64)
        param.grad, plain.grad = grad.clone(), grad.clone()
        ours.step()
        theirs.step()
    assert torch.equal(param.value, plain)  # type: ignore[attr-defined]
    assert all(type(state) is Tensor for state in ours.state[param].values())


def test_arithmetic_takes_the_value() -> None:
    param = trained(32, 64)
    value = param.value  # type: ignore[attr-defined]
    with torch.no_grad():
        assert torch.equal(param.norm(), value.norm())
        assert torch.equal(param + 1, value + 1)
        assert type(torch.zeros_like(param)) is Tensor
        average = torch.zeros(32, 64)
        average.lerp_(param, 0.5)
        assert torch.equal(average, value / 2)
        vector = torch.nn.utils.parameters_to_vector([param])
        assert torch.equal(vector, value.flatten())
        torch.nn.utils.vector_to_parameters(vector * 2, [param])
        assert torch.equal(param.value, vector.reshape(32, 64) * 2)  # type: ignore[attr-defined]
    with pytest.raises(ArgumentError, match=r"For a penalty on its values take weight\.floats"):
        (param**2).sum()
    assert torch.equal(param.detach() + 1, param.value + 1)  # type: ignore[attr-defined]
    frozen = trained(32, 64).requires_grad_(False)
    with pytest.raises(ArgumentError, match="on a weight in training"):
        torch.cat([frozen, frozen])
    (param.floats() ** 2).sum().backward()  # type: ignore[attr-defined]
    assert param.grad is not None
    assert torch.equal(param.grad, 2 * param.value)  # type: ignore[attr-defined]


def test_functions_that_write_give_what_they_wrote_to() -> None:
    """torch.eye(.., out=weight), in nn.init.eye_, gave its first argument, a number."""
    param = trained(8, 32)
    assert nn.init.eye_(param) is param
    assert torch.equal(param.value, torch.eye(8, 32))  # type: ignore[attr-defined]
    with torch.no_grad():
        other = torch.empty(8, 32)
        assert torch.add(param, 1, out=other) is other
        assert torch.equal(other, torch.eye(8, 32) + 1)


@pytest.mark.parametrize("shape", [(32, 64), (4, 32, 64)])
def test_numbers_picked_by_a_mask_are_those_of_the_value(shape: tuple[int, ...]) -> None:
    """Optimizers that update some numbers only pick them so; they were rounded, as if they were a row of a table."""
    param = trained(*shape)
    value = param.value.clone()  # type: ignore[attr-defined]
    mask = value > 0.5
    with torch.no_grad():
        assert torch.equal(param[mask], value[mask])
        param[mask] = param[mask] * 2
    assert torch.equal(param.value, torch.where(mask, value * 2, value))  # type: ignore[attr-defined]
    assert torch.equal(param.detach()[mask], param.value[mask])  # type: ignore[attr-defined]


def test_averages_of_the_weights() -> None:
    module = nn.Linear(64, 32, bias=False)
    module.weight = trained(32, 64)
    value = module.weight.value.clone()  # type: ignore[attr-defined]
    average = torch.optim.swa_utils.AveragedModel(module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    average.update_parameters(module)
    with torch.no_grad():
        module.weight.add_(1)
    average.update_parameters(module)
    kept = average.module.weight
    assert isinstance(kept, TrainedTensor)
    assert torch.allclose(kept.value, value + 0.5)


def test_a_weight_is_copied_into_another_while_gradients_are_recorded() -> None:
    """As Lightning's averages do when they end."""
    param, other = trained(32, 64), trained(32, 64)
    other.detach().copy_(param)
    assert torch.equal(other.value, param.value)  # type: ignore[attr-defined]
    assert other.requires_grad
    assert other.is_leaf
    with pytest.raises(ArgumentError, match="on a weight in training"):
        torch.zeros(32, 64).copy_(param)


def test_clipping_and_zeroing_gradients() -> None:
    param = trained(32, 64)
    F.linear(torch.randn(4, 64), param).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_([param], 1e-3)
    assert norm > 1e-3
    assert param.grad is not None
    assert param.grad.norm() <= 1e-3 * 1.001


def same(a: Tensor, b: Tensor) -> bool:
    assert isinstance(a, TrainedTensor)
    assert isinstance(b, TrainedTensor)
    return torch.equal(a.value, b.value) and a.rounding == b.rounding and a.requires_grad == b.requires_grad


def test_copies() -> None:
    module = nn.Linear(64, 32)
    module.weight = trained(32, 64, scheme="int8-static")
    module.weight.act_scale = torch.ones(1, 1)  # type: ignore[attr-defined]
    other = copy.deepcopy(module)
    assert isinstance(other.weight, nn.Parameter)
    assert same(module.weight, other.weight)
    assert other.weight.value is not module.weight.value  # type: ignore[attr-defined]
    assert torch.equal(other.weight.act_scale, torch.ones(1, 1))  # type: ignore[attr-defined]
    pickled = pickle.loads(pickle.dumps(module.weight))
    assert isinstance(pickled, nn.Parameter)
    assert same(module.weight, pickled)
    assert torch.equal(pickled.act_scale, torch.ones(1, 1))  # type: ignore[attr-defined]


def test_other_dtypes_and_devices() -> None:
    module = nn.Linear(64, 32)
    module.weight = trained(32, 64, scheme="int8-static")
    module.weight.act_scale = torch.ones(1, 1)  # type: ignore[attr-defined]
    module.to(torch.bfloat16)
    assert isinstance(module.weight, TrainedTensor)
    assert (module.weight.dtype, module.weight.value.dtype) == (torch.bfloat16, torch.bfloat16)
    assert module.weight.act_scale is not None
    assert module.weight.act_scale.dtype == torch.float32
    module.to_empty(device="cpu")
    assert isinstance(module.weight, TrainedTensor)
    assert torch.equal(module.weight.act_scale, torch.ones(1, 1))
    module.weight.act_scale = None
    module.to("meta")
    assert isinstance(module.weight, TrainedTensor)
    assert module.weight.value.device.type == "meta"
    module.to_empty(device="cpu")
    assert isinstance(module.weight, TrainedTensor)
    assert module.weight.value.device.type == "cpu"
    assert isinstance(module.weight, nn.Parameter)


def test_shared_memory() -> None:
    module = nn.Linear(64, 32)
    module.weight = trained(32, 64)
    assert not module.weight.is_shared()
    module.share_memory()
    assert module.weight.is_shared()
    assert module.weight.value.is_shared()  # type: ignore[attr-defined]


def test_data_can_be_set() -> None:
    param = trained(32, 64)
    fresh = torch.randn(32, 64)
    param.data = fresh
    assert torch.equal(param.value, fresh)  # type: ignore[attr-defined]
    other = trained(32, 64, scheme="int8")
    param.data = other.data
    assert same(param, other)


def test_pieces_are_rounded_as_the_whole() -> None:
    param = trained(64, 128)
    whole = quantize_tensor(param.value, "int4-g32").dequantize()  # type: ignore[attr-defined]
    x, half = torch.eye(128), torch.eye(64)
    top, bottom = param.chunk(2)
    assert torch.equal(F.linear(x, top).t(), whole[:32])
    assert torch.equal(F.linear(x, bottom).t(), whole[32:])
    assert torch.equal(F.linear(x, param[7:9]).t(), whole[7:9])
    assert torch.equal(F.linear(half, param[:, 64:]).t(), whole[:, 64:])
    for piece in param.split([10, 54]):
        assert isinstance(piece, TrainedTensor)
    F.linear(x, bottom).sum().backward()
    assert param.grad is not None
    assert not param.grad[:32].any()
    assert param.grad[32:].all()


@pytest.mark.parametrize(
    ("scheme", "cut", "match"),
    [
        ("int4-g32", lambda w: w[:, :40], "columns 0:40:1 .* the 32 columns of a block"),
        ("int8", lambda w: w[:, :64], "columns 0:64:1 .* one scale for all columns"),
        ("fp8", lambda w: F.linear(w.value, w[:8]), "is a shard, which is not rounded alone"),
        ("fp8-block", lambda w: F.linear(w.value, w[:64]), "is a shard, which is not rounded alone"),
        ("fp8", lambda w: w.t()[:, :8], "rows 0:8:1 .* one scale for all rows; a scheme with a scale for each"),
        ("int8-dyn", lambda w: w[:, :128], "one scale for all columns; a scheme with groups of them, such as int4-g32"),
        ("nvfp4", lambda w: w[:, :128], "one scale for all columns"),
        ("int4-g32", lambda w: w[::2], "rows 0:256:2"),
        ("nvfp4", lambda w: F.linear(w.value, w[:128]), "is a shard, which is not rounded alone"),
        ("int4-g32", lambda w: w[0], "indexed in dimension 0"),
        ("int4-g32", lambda w: w[w.value > 0], "indexed by a mask of several dimensions"),
        ("int4-g32", lambda w: w.flatten(), "seen as"),
        ("int4-g32", lambda w: w.reshape(128, 2, 256), "seen as"),
        ("int4-g32", lambda w: w[:, None], "weight.floats"),
        ("int4-g32", lambda w: w.expand(2, 256, 256)[None], "weight.floats"),
        ("int4-g32", lambda w: torch.cat([w, w]), "weight.floats"),
    ],
)
def test_pieces_that_lose_how_they_are_rounded(scheme: str, cut: object, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        cut(trained(256, 256, scheme=scheme))  # type: ignore[operator]


@torch.library.custom_op("bitport_test::product", mutates_args=())
def product_of_others(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_a_product_of_another_library_is_refused(mode: Callable[[], Any]) -> None:
    """Its kernel was given the float values, since it is called without recording gradients."""
    param, x = trained(32, 64), torch.randn(4, 64)
    product_of_others.register_autograd(lambda ctx, g: (None, None))
    with mode(), pytest.raises(ArgumentError, match=r"bitport_test\.product.* on a weight in training"):
        product_of_others(x, param)
    value = param.value  # type: ignore[attr-defined]
    assert torch.equal(product_of_others(x, param.floats().detach()), x @ value.t())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "function", [torch.fft.fft2, lambda w: w.to(torch.complex64), lambda w: w.as_strided((8,), (1,))]
)
def test_floats_do_not_leave_by_a_cast_or_strides(function: Callable[[Tensor], Tensor]) -> None:
    param = trained(32, 64)
    with pytest.raises(ArgumentError, match="on a weight in training"):
        function(param)
    with torch.no_grad():
        assert torch.equal(function(param), function(param.value))  # type: ignore[attr-defined]


def test_products_other_than_linear_layers() -> None:
    param = trained(64, 128)
    whole = quantize_tensor(param.value, "int4-g32").dequantize()  # type: ignore[attr-defined]
    x = torch.randn(4, 128)
    assert torch.allclose(x @ param.t(), x @ whole.t(), atol=1e-4)
    assert torch.allclose(torch.addmm(torch.ones(64), x, param.t(), beta=2), x @ whole.t() + 2, atol=1e-4)
    assert torch.allclose(param @ x.t(), whole @ x.t(), atol=1e-4)
    assert torch.allclose(x[:, :64] @ param, x[:, :64] @ whole, atol=1e-4)
    assert torch.equal(F.embedding(torch.tensor([5, 1, 5]), param), whole[[5, 1, 5]])
    assert torch.equal(param[torch.tensor([5, 1])], whole[[5, 1]])


ELSEWHERE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "addbmm": lambda x, w: torch.addbmm(x, x[None], w[None]),
    "vecdot": lambda x, w: torch.linalg.vecdot(x, w),
    "smm": lambda x, w: torch.smm(x.to_sparse(), w),
    "sparse.addmm": lambda x, w: torch.sparse.addmm(x, x.to_sparse(), w),
    "sampled": lambda x, w: torch.sparse.sampled_addmm(x.to_sparse_csr(), x, w),
    "hspmm": lambda x, w: torch.hspmm(x.to_sparse(), w),
    "linear.out": lambda x, w: torch.ops.aten.linear.out(x, w, out=torch.empty(64, 64)),
    "mm.out": lambda x, w: torch.ops.aten.mm.out(x, w, out=torch.empty(64, 64)),
    "mv": lambda x, w: torch.ops.aten.mv(w, x[0]),
    "addmv_": lambda x, w: x[0].clone().addmv_(w, x[0]),
    "addmm_": lambda x, w: torch.ops.aten.addmm_(x.clone(), x, w),
    "einsum": lambda x, w: torch.ops.aten.einsum("ij,kj->ik", [x, w]),
    "conv1d": lambda x, w: F.conv1d(x[..., None], w[:, :, None]),
    "conv_tbc": lambda x, w: torch.conv_tbc(x[None], w[None], x[0]),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("product", ELSEWHERE)
def test_products_without_a_rounded_form_are_refused(product: str, mode: Callable[[], Any]) -> None:
    """They would multiply the float values, which are not those of the quantized model."""
    with (
        mode(),
        pytest.raises(
            ArgumentError, match=r"on a weight in training|not rounded alone, or another view|loses its rows"
        ),
    ):
        ELSEWHERE[product](torch.randn(64, 64), trained(64, 64))


def test_views_can_be_calculated_with() -> None:
    param = trained(64, 64)
    with torch.no_grad():
        assert torch.equal((param[:, :, None] - 1).abs().amin(-1), (param.value - 1).abs())  # type: ignore[attr-defined]


@pytest.mark.parametrize("scheme", ["int4-g32", "int8-dyn"])
def test_a_product_of_two_weights_in_training(scheme: str) -> None:
    """``w @ w`` ended in StopIteration. The second is the input of the first, so it is rounded as inputs are."""
    param = trained(64, 64, scheme=scheme)
    whole = quantize_tensor(param.value, scheme).dequantize().double()  # type: ignore[attr-defined]
    right = whole.float() if not param.scheme.act else fake_quantize(whole.float().mT, param.scheme.act).mT  # type: ignore[attr-defined]
    for got in (param @ param, param.detach() @ param):
        assert float(sqnr(whole @ right.double(), got.detach())) >= product_budget(torch.float32, 64, got.numel())


def test_tables_with_scales_over_rows() -> None:
    param = trained(256, 128, scheme="fp8-block-wo")
    whole = quantize_tensor(param.value, "fp8-block-wo").dequantize()  # type: ignore[attr-defined]
    rows = F.embedding(torch.tensor([5, 200]), param)
    assert torch.equal(rows, whole[[5, 200]])
    rows.sum().backward()
    assert param.grad is not None
    assert param.grad.sum() == 2 * 128


@pytest.mark.parametrize(
    ("cut", "error"),
    [
        pytest.param(lambda w: w.select(2, 0), IndexError, id="no-such-dimension"),
        pytest.param(lambda w: w.split([10, 50]), ArgumentError, id="sizes-too-small"),
        pytest.param(lambda w: w.split(0), (ArgumentError, RuntimeError), id="size-zero"),
    ],
)
def test_out_of_bounds(cut: Callable[[Tensor], object], error: type[Exception]) -> None:
    with pytest.raises(error):
        cut(trained(64, 128))


@pytest.mark.parametrize("access", [torch.from_dlpack, lambda w: w.apply_(abs)], ids=["dlpack", "apply_"])
def test_memory_that_is_not_there_is_not_read(access: Callable[[Tensor], object]) -> None:
    with pytest.raises(ArgumentError, match="on a weight in training"):
        access(trained(64, 128).data)


def test_repr_says_what_it_is() -> None:
    assert repr(trained(32, 64).data) == "TrainedTensor([32, 64], int4-g32, value=torch.float32 on cpu)"
