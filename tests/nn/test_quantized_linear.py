"""QuantizedLinear: built from (in, out), loaded with ready-made codes, swapped into a model."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

import bitport
from bitport.errors import ArgumentError
from bitport.nn import QuantizedLinear, swap_linears_
from bitport.numerics import Format
from bitport.schemes import Scheme
from bitport.tensor import QTensor


@pytest.mark.parametrize("bias", [False, True])
def test_a_fresh_layer_gives_zeros(bias: bool) -> None:
    layer = QuantizedLinear(32, 16, "int4-g32", bias=bias, dtype=torch.bfloat16)
    y = layer(torch.randn(3, 32).bfloat16())
    assert y.shape == (3, 16)
    assert y.dtype == torch.bfloat16
    assert not y.any()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block", [0, 8])
@pytest.mark.parametrize("asym", [False, True])
def test_loaded_codes(bits: int, block: int, asym: bool) -> None:
    """value = weight * scaler - zero_point, in the shapes of the PyTorch/XLA page."""
    n, k = 16, 32
    scheme = f"int{bits}-" + (f"g{block}" if block else "channel") + ("-fzero" if asym else "-sym")
    low = -(1 << (bits - 1))
    grid = (k // block, n) if block else (n,)
    codes = torch.randint(low, -low, (k // block, block, n) if block else (n, k)).to(torch.int8)
    scaler, zero = torch.rand(grid) + 0.5, torch.randn(grid) if asym else None
    layer = QuantizedLinear(k, n, scheme)
    layer.load_quantized_weight(codes, scaler, zero)
    x = torch.randn(3, k)
    wanted = torch.ops.bitport.quantized_matmul(x, codes, scaler, zero, block or -1)
    torch.testing.assert_close(layer(x), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("scheme", "change", "message"),
    [
        pytest.param("fp8-row", {}, "not an integer scheme", id="float-scheme"),
        pytest.param(Scheme(weight=Format(dtype="int1")), {}, "one bit stands for -1/2 or 1/2", id="one-bit"),
        pytest.param("int8-g3", {}, "dividing 32", id="group-not-dividing"),
        pytest.param("int8-asym", {}, "zero point kind 'int'", id="whole-zero"),
        pytest.param("int8", {"zero_point": torch.zeros(16)}, "zero point kind 'none'", id="zero-not-wanted"),
        pytest.param("int8-fzero", {}, "zero point kind 'float'", id="zero-missing"),
        pytest.param(
            "int8",
            {"weight": torch.zeros(16, 31, dtype=torch.int8)},
            r"weight must have shape \[16, 32\], not \[16, 31\]",
            id="weight-shape",
        ),
        pytest.param("int8", {"scaler": torch.zeros(15)}, r"scaler must have shape \[16\]", id="scaler-shape"),
        pytest.param(
            "int4-channel-sym",
            {"weight": torch.full((16, 32), 8, dtype=torch.int8)},
            r"values -8\.\.7 for int4",
            id="code-too-large",
        ),
        pytest.param("int8", {"weight": torch.zeros(16, 32, dtype=torch.int32)}, "must be int8", id="weight-dtype"),
    ],
)
def test_what_cannot_be_loaded(scheme: str | Scheme, change: dict[str, torch.Tensor], message: str) -> None:
    given = {"weight": torch.zeros(16, 32, dtype=torch.int8), "scaler": torch.ones(16), **change}
    with pytest.raises(ArgumentError, match=message):
        QuantizedLinear(32, 16, scheme).load_quantized_weight(**given)


def test_from_a_layer() -> None:
    layer = nn.Linear(32, 16)
    quantized = QuantizedLinear.from_linear(layer, "int4-g32")
    x = torch.randn(3, 32)
    torch.testing.assert_close(quantized(x), x @ quantized.weight.dequantize().T + layer.bias)
    assert quantized.bias is layer.bias
    again = QuantizedLinear.from_linear(nn.Linear(32, 16), "int8")
    layer.weight = again.weight
    with pytest.raises(ArgumentError, match="is int8 already, not int4-g32"):
        QuantizedLinear.from_linear(layer, "int4-g32")
    layer.weight = nn.Parameter(torch.full((16, 32), torch.nan))
    with pytest.raises(ArgumentError, match="weight holds NaN or infinity"):
        QuantizedLinear.from_linear(layer, "int4-g32")


def test_swapped_into_a_model() -> None:
    model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Sequential(nn.Linear(16, 8)), nn.LayerNorm(8))
    assert swap_linears_(model, {"2.*": "int8"}) == ["2.0"]
    assert type(model[0]) is nn.Linear
    assert isinstance(model[2][0], QuantizedLinear)
    assert model(torch.randn(3, 32)).shape == (3, 8)


def test_what_is_shared_stays_shared() -> None:
    model = nn.ModuleDict({"a": nn.Linear(32, 16), "b": nn.Linear(32, 16)})
    model["b"].weight, model["c"] = model["a"].weight, model["a"]
    assert swap_linears_(model, "int8") == ["a", "b", "c"]
    assert model["a"] is model["c"] is not model["b"]
    assert model["a"].weight is model["b"].weight


def test_a_tied_embedding_stays_tied_and_hooks_and_mode_are_kept() -> None:
    model, seen = nn.ModuleDict({"embed": nn.Embedding(16, 32), "head": nn.Linear(32, 16, bias=False)}), []
    model["head"].weight = model["embed"].weight
    head, wanted = model["head"], bitport.quantize_tensor(model["embed"].weight.detach(), "int8").dequantize()
    head.register_forward_hook(lambda *args: seen.append("after"))
    head.register_forward_pre_hook(lambda *args: seen.append("before"))
    model.eval()
    assert swap_linears_(model, "fp8-wo") == [], "a scheme given by name leaves the embedding, and so both"
    assert swap_linears_(model, [("*", "int8", ("linear", "embedding"))]) == ["head"]
    assert model["head"] is head
    assert isinstance(head, QuantizedLinear)
    assert model["embed"].weight is head.weight
    assert not head.training
    x = torch.randn(3, 32)
    torch.testing.assert_close(head(x), x @ wanted.T)
    assert torch.equal(model["embed"](torch.arange(16)), wanted)
    assert seen == ["before", "after"]
    assert str(head) == "QuantizedLinear(in_features=32, out_features=16, scheme=int8, bias=False)"
    assert not QuantizedLinear.from_linear(nn.Linear(32, 16).eval(), "int8").training


def test_a_static_input_scale_has_to_be_measured_before() -> None:
    model, x = nn.Sequential(nn.Linear(32, 16)), torch.randn(9, 32)
    with pytest.raises(ArgumentError, match=r"1 weights \(0\.weight\) have a static input scale, .* first"):
        swap_linears_(model, "int8-static")
    with pytest.raises(ArgumentError, match=r"int8-static has a static input scale, .* first"):
        QuantizedLinear.from_linear(model[0], "int8-static")
    assert type(model[0]) is nn.Linear
    bitport.quantize_(model, "int8-static", calibrate=[x])
    y = model(x)
    assert swap_linears_(model, "int8-static") == ["0"]
    assert torch.equal(model(x), y)


def test_what_is_quantized_already_is_kept() -> None:
    model = nn.Sequential(nn.Linear(32, 16))
    bitport.quantize_(model, "int8")
    weight = model[0].weight
    assert swap_linears_(model, "int8") == ["0"]
    assert model[0].weight.qdata.data_ptr() == weight.qdata.data_ptr()
    bitport.quantize_(other := nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)), {"1": "int4"})
    with pytest.raises(ArgumentError, match="1 is int4 already, not int8"):
        swap_linears_(other, "int8")
    assert type(other[0]) is nn.Linear, "nothing was changed"


def test_what_is_not_swapped() -> None:
    with pytest.raises(ArgumentError, match=r"itself a linear layer: .* QuantizedLinear\.from_linear"):
        swap_linears_(nn.Linear(32, 16), "int8")
    model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 8))
    nn.init.constant_(model[1].weight, float("nan"))
    with pytest.raises(ArgumentError, match=r"1\.weight holds NaN"):
        swap_linears_(model, "int8")
    assert type(model[0]) is nn.Linear


def test_a_channel_of_zeros() -> None:
    scaler, zero = torch.ones(16), torch.zeros(16)
    scaler[3] = 0
    layer = QuantizedLinear(32, 16, "int8-fzero")
    layer.load_quantized_weight(torch.ones(16, 32, dtype=torch.int8), scaler, zero)
    assert torch.equal(layer.weight.dequantize(), scaler[:, None].expand(16, 32))
    zero[3] = 1
    with pytest.raises(ArgumentError, match="zero_point cannot be kept in units of codes"):
        layer.load_quantized_weight(torch.ones(16, 32, dtype=torch.int8), scaler, zero)


def test_state_dict() -> None:
    torch.manual_seed(1)
    first, second = (QuantizedLinear.from_linear(nn.Linear(32, 16), "int4-g32") for _ in range(2))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert isinstance(second.weight, QTensor)
    assert torch.equal(first.weight, second.weight)
