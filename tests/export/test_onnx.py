"""Models for ONNX Runtime: bitport's codes and scales, its operators, the same numbers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bitport as bp
from bitport.errors import ArgumentError, ExportError
from bitport.export import Method, decomposed, onnx, onnx_qdq
from bitport.export.lookup import Lookup
from bitport.export.onnx_weight import OnnxWeight, refusal
from bitport.export.relink import relinked
from bitport.numerics import fake_quantize, unpack_bits
from bitport.tensor import QTensor, quantize_tensor

N = 24
WEIGHT_ONLY = ("int4-g32", "int4-g32-sym", "int4-g32-fzero", "int4-channel", "int4-b8x32-sym", "int8", "int8-g64-asym")
STANDARD = ("int4-g32", "int4-g24-sym", "int4-channel", "int4-b8x32-sym", "int8", "int8-g64-asym")
ROUNDED = ("int8-dyn", "int4-int8-g32")
REFUSED = {
    "int3-g32": "weights of int4 or int8",
    "nf4": "weights of int4 or int8",
    "int4-g24": "power of two of at least 16",
    "int4-g8": "power of two of at least 16",
    "int4-fp8": "not to fp8",
}


def quantized(scheme: str, k: int, dtype: torch.dtype = torch.float32) -> QTensor:
    numbers = torch.Generator().manual_seed(k)
    return quantize_tensor(torch.randn(N, k, generator=numbers).to(dtype), scheme)


def value_of(weight: OnnxWeight) -> Tensor:
    """The weight in float64, according to ONNX Runtime's documentation of the operands."""
    codes, zero, scale = weight.codes.numpy(), weight.zero, weight.scale.double().numpy()
    codes = codes.reshape(weight.n, weight.blocks, -1)
    if weight.bits == 4:
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(weight.n, weight.blocks, -1)
    if zero is None:
        zeros = np.full((weight.n, weight.blocks), 2.0 ** (weight.bits - 1))
    elif zero.is_floating_point():
        zeros = zero.double().numpy()
    elif weight.bits == 4:
        zeros = np.stack([zero.numpy() & 15, zero.numpy() >> 4], -1).reshape(weight.n, -1)[:, : weight.blocks]
    else:
        zeros = zero.numpy()
    value = (codes.astype(np.float64) - zeros[..., None]) * scale[..., None]
    return torch.from_numpy(value.reshape(weight.n, -1)[:, : weight.k].copy())


@pytest.mark.parametrize("k", [64, 72, 200])
@pytest.mark.parametrize("scheme", [*WEIGHT_ONLY, *ROUNDED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_operands_mean_the_same_numbers(scheme: str, k: int, dtype: torch.dtype) -> None:
    q = quantized(scheme, k, dtype)
    assert refusal(q, "linear") is None
    parts, rows = q.plain(), torch.arange(N) // q.matrix.block_n
    codes = unpack_bits(parts.data, q.scheme.weight.number.bits, k).double()
    columns = torch.arange(k) // q.matrix.block_k
    zero = q.scheme.weight.number.midpoint if parts.zero is None else parts.zero.double()[rows][:, columns]
    assert torch.equal(value_of(OnnxWeight(q)), (codes - zero) * parts.scale.double()[rows][:, columns])


@pytest.mark.parametrize("scheme", REFUSED)
def test_what_is_refused_is_named(scheme: str) -> None:
    model = nn.Sequential(nn.Linear(48, 48))
    bp.quantize_(model, scheme, measure=False)
    with pytest.raises(ExportError, match=REFUSED[scheme]) as raised:
        relinked(Method(model, (torch.ones(2, 48),)), refusal, OnnxWeight, OnnxWeight)
    assert "0.weight is" in str(raised.value)


@pytest.mark.parametrize("scheme", ["int4-g32-fzero", *list(REFUSED)[:2]])
def test_what_standard_operators_refuse(scheme: str) -> None:
    model = nn.Sequential(nn.Linear(48, 48))
    bp.quantize_(model, scheme, measure=False)
    said = "whole zero points or none" if "fzero" in scheme else REFUSED[scheme]
    with pytest.raises(ExportError, match=said):
        relinked(Method(model, (torch.ones(2, 48),)), onnx_qdq.refusal, onnx_qdq.QdqWeight, Lookup)


def test_a_table_with_float_zero_points_is_refused() -> None:
    table = nn.Embedding(40, 64)
    bp.quantize_(table, {"*": "int4-g32-fzero"}, measure=False)
    with pytest.raises(ExportError, match="whole zero points or none"):
        relinked(Method(table, (torch.arange(3),)), refusal, OnnxWeight, OnnxWeight)


def test_bfloat16_is_refused_with_what_to_do(tmp_path: Path) -> None:
    model = nn.Linear(64, 8).bfloat16()
    with pytest.raises(ArgumentError, match=r"module\.float\(\)"):
        onnx(model, (torch.ones(2, 64),), tmp_path / "model.onnx")


def test_the_file_must_be_one(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"\*\.onnx in a folder that exists"):
        onnx(nn.Linear(8, 8), (torch.ones(2, 8),), tmp_path / "missing" / "model.onnx")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ExportError, match=r"onnxscript.*pip install 'bitport\[onnx\]'"):
        onnx(nn.Linear(8, 8), (torch.ones(2, 8),), tmp_path / "model.onnx")


def run(path: Path, *inputs: Tensor) -> list[Tensor]:
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    feeds = {name: value.numpy() for name, value in zip(names, inputs, strict=True)}
    return [torch.from_numpy(each) for each in session.run(None, feeds)]


LAYERS = [
    *(pytest.param(scheme, False, id=scheme) for scheme in (*WEIGHT_ONLY, *ROUNDED)),
    *(pytest.param(scheme, True, id=f"standard-{scheme}") for scheme in (*STANDARD, *ROUNDED)),
]


@pytest.mark.peers
@pytest.mark.parametrize("k", [64, 72])
@pytest.mark.parametrize(("scheme", "standard"), LAYERS)
def test_a_layer_gives_the_same_numbers(scheme: str, standard: bool, k: int, tmp_path: Path) -> None:
    """In float32: each of the k products involves a value with two roundings, and the sum adds at most k more."""
    layer = nn.Linear(k, N).eval()
    bp.quantize_(layer, scheme, measure=False)
    path, rows = tmp_path / "layer.onnx", torch.export.Dim("rows", min=1, max=64)
    report = onnx(layer, (torch.randn(4, k),), path, ({0: rows},), inputs=["x"], outputs=["y"], standard=standard)
    assert report["operators"]["DequantizeLinear" if standard else "com.microsoft::MatMulNBits"] == 1
    weight = layer.weight.dequantize(torch.float64)
    for rows_given in (1, 7):
        x = torch.randn(rows_given, k)
        act = layer.weight.scheme.act
        rounded = (fake_quantize(x, act) if act else x).double()
        expected = rounded @ weight.T + layer.bias.double()
        budget = 2.0**-24 * (k + 4) * (rounded.abs() @ weight.abs().T + layer.bias.abs().double())
        (y,) = run(path, x)
        assert torch.all((y.double() - expected).abs() <= budget)


@pytest.mark.peers
@pytest.mark.parametrize("standard", [False, True], ids=["microsoft", "standard"])
@pytest.mark.parametrize("scheme", ["int4-g32", "int4-g32-sym", "int8", "int8-g64-asym"])
def test_a_table_gives_the_same_numbers(scheme: str, standard: bool, tmp_path: Path) -> None:
    """The difference of two integers is exact, and the product with a scale is rounded once in both."""
    table = nn.Embedding(40, 72)
    bp.quantize_(table, {"*": scheme}, measure=False)
    path, ids = tmp_path / "table.onnx", torch.tensor([[0, 39, 7]])
    report = onnx(table, (ids,), path, standard=standard)
    assert report["operators"].get("com.microsoft::GatherBlockQuantized", 0) == (not standard)
    (rows,) = run(path, ids)
    assert torch.equal(rows, table(ids))


@pytest.mark.peers
@pytest.mark.parametrize("standard", [False, True], ids=["microsoft", "standard"])
def test_the_file_holds_our_codes(standard: bool, tmp_path: Path) -> None:
    """Byte for byte. Changing one code by one step changes one output by that step."""
    package: Any = pytest.importorskip("onnx")
    layer = nn.Linear(64, N, bias=False).eval()
    bp.quantize_(layer, "int4-g32-sym", measure=False)
    path, x = tmp_path / "layer.onnx", torch.zeros(1, 64)
    x[0, 2] = 1.0
    onnx(layer, (x,), path, standard=standard)
    model = package.load(path)
    (codes,) = (each for each in model.graph.initializer if each.name.endswith("codes4" if standard else "codes"))
    assert codes.raw_data == layer.weight.plain().data.numpy().tobytes()
    (before,) = run(path, x)
    data = bytearray(codes.raw_data)
    up = -1 if data[1] & 15 else 1
    data[1] += up
    codes.raw_data = bytes(data)
    package.save(model, path)
    (after,) = run(path, x)
    step = torch.zeros(1, N)
    step[0, 0] = up * layer.weight.plain().scale[0, 0]
    torch.testing.assert_close(after - before, step, rtol=2.0**-22, atol=0)


@pytest.mark.peers
def test_weights_in_a_file_of_their_own(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)).eval()
    bp.quantize_(model, "int4-g32", measure=False)
    path, x = tmp_path / "model.onnx", torch.randn(2, 256)
    files = onnx(model, (x,), path, external=True)["files"]
    assert files == {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    stored = 2 * 256 * 256 // 2 + 2 * 256 * 8 * 4 + 2 * 256 * 4  # codes, scales in float32, zeros
    assert stored <= files["model.onnx.data"] <= stored + 6 * 4096
    assert files["model.onnx"] < 10_000
    torch.testing.assert_close(run(path, x)[0], model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.peers
@pytest.mark.parametrize("standard", [False, True], ids=["microsoft", "standard"])
def test_a_recurrent_layer(standard: bool, tmp_path: Path) -> None:
    """A step is a product as in a linear layer. In float32 a gate is a sum of 56 products, together below
    5 in size, and each addition rounds by 2^-24 of it."""
    layer = nn.LSTM(32, 24, num_layers=2, bidirectional=True, proj_size=16, batch_first=True).eval()
    bp.quantize_(layer, {"*": "int8"}, measure=False)
    path, batch = tmp_path / "layer.onnx", torch.export.Dim("batch", min=1, max=8)
    given = torch.randn(2, 3, 32), (torch.randn(4, 2, 16), torch.randn(4, 2, 24))
    report = onnx(layer, given, path, ({0: batch}, ({1: batch}, {1: batch})), standard=standard)
    assert report["operators"].get("com.microsoft::MatMulNBits", 0) == (0 if standard else 4 * (1 + 3 + 3))
    x, hidden, cell = torch.randn(5, 3, 32), torch.randn(4, 5, 16), torch.randn(4, 5, 24)
    exact = bp.dequantize_(copy.deepcopy(layer)).double()
    y, (last, kept) = exact(x.double(), (hidden.double(), cell.double()))
    for made, wanted in zip(run(path, x, hidden, cell), (y, last, kept), strict=True):
        torch.testing.assert_close(made.double(), wanted, rtol=0, atol=2e-5)


@pytest.mark.peers
@pytest.mark.parametrize("scheme", ["int3", "int4", "int8-dyn", "nf4"])
def test_a_decomposed_program(scheme: str, tmp_path: Path) -> None:
    """Bounds as for a layer."""
    layer, path, x = nn.Linear(72, N).eval(), tmp_path / "layer.onnx", torch.randn(3, 72)
    bp.quantize_(layer, scheme, measure=False)
    torch.onnx.export(decomposed(layer, (x,)), dynamo=True, verbose=False).save(path)
    act, weight = layer.weight.scheme.act, layer.weight.dequantize(torch.float64)
    rounded = (fake_quantize(x, act) if act else x).double()
    expected = rounded @ weight.T + layer.bias.double()
    budget = 2.0**-24 * (72 + 4) * (rounded.abs() @ weight.abs().T + layer.bias.abs().double())
    assert torch.all((run(path, x)[0].double() - expected).abs() <= budget)
