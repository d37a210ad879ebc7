"""Programs for ExecuTorch: bitport's codes and scales, XNNPACK's products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bitport as bp
from bitport.errors import ArgumentError, ExportError
from bitport.export import Method, decomposed, executorch
from bitport.export.lookup import Lookup
from bitport.export.relink import relinked
from bitport.export.xnnpack_weight import XnnpackWeight, refusal
from bitport.numerics import fake_quantize, unpack_bits
from bitport.tensor import QTensor, quantize_tensor

TAKEN = ("int8-dyn", "int4-int8-g32", "int4-int8-channel")
REFUSED = {
    "int4-g32": "no zero points",
    "int4-g32-sym": "takes them as they are: choose int4-int8 or int8-dyn",
    "int4-fp8": "rounded to fp8",
    "int3-g32": "weights of int4 or int8",
    "int4-int8-g16": "a multiple of 32 columns that divides k",
    "int4-int8-g64": "a multiple of 32 columns that divides k",
    "int4-int8-b8x32": "scales of single rows",
}
N, K = 48, 96


def quantized(scheme: str, dtype: torch.dtype = torch.bfloat16) -> QTensor:
    return quantize_tensor(torch.randn(N, K, generator=torch.Generator().manual_seed(0)).to(dtype), scheme)


def layer_of(scheme: str, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(K, N, bias=bias).bfloat16().eval()
    bp.quantize_(layer, scheme, measure=False)
    return layer.float()


def exact(q: QTensor) -> Tensor:
    bits, scale = q.scheme.weight.number.bits, q.plain().scale.double()
    codes = unpack_bits(q.plain().data, bits, q.matrix.k).double() - 2 ** (bits - 1)
    return codes * scale.repeat_interleave(q.matrix.block_k, 1)[:, : q.matrix.k]


@pytest.mark.parametrize("scheme", TAKEN)
def test_the_operands_mean_the_same_numbers(scheme: str) -> None:
    """A code has 8 bits and a bfloat16 scale has 8 too, so float32 holds their product exactly."""
    q = quantized(scheme)
    assert refusal(q, "linear") is None
    weight = XnnpackWeight(q)
    if scheme == "int8-dyn":  # its scales are float32
        torch.testing.assert_close(weight.value().double(), exact(q), rtol=2.0**-24, atol=0)
    else:
        assert torch.equal(weight.value().double(), exact(q))


@pytest.mark.parametrize("scheme", ["int8", "int4-g32-sym", "int4-channel-sym", "int4-int8-g32"])
def test_a_lookup_is_computed_from_the_codes(scheme: str) -> None:
    table = nn.Embedding(N, K).bfloat16()
    bp.quantize_(table, {"*": scheme}, measure=False)
    table, ids = table.float(), torch.tensor([[3, 0], [47, 11]])
    program = relinked(Method(table, (ids,)), refusal, XnnpackWeight, Lookup)
    assert torch.equal(program.module()(ids), table(ids))


@pytest.mark.parametrize("scheme", REFUSED)
def test_what_is_refused_is_named(scheme: str) -> None:
    model = nn.Sequential(layer_of(scheme))
    with pytest.raises(ExportError, match=REFUSED[scheme]) as raised:
        relinked(Method(model, (torch.ones(2, K),)), refusal, XnnpackWeight, Lookup)
    assert "0.weight is" in str(raised.value)


def test_scales_that_would_be_rounded_are_refused() -> None:
    assert "bfloat16" in str(refusal(quantized("int4-int8-g32", torch.float32), "linear"))
    assert refusal(quantized("int4-int8-channel", torch.float32), "linear") is None


def test_the_file_must_be_one_and_float32(tmp_path: Path) -> None:
    layer, x = layer_of("int8-dyn"), torch.ones(2, K)
    with pytest.raises(ArgumentError, match=r"\*\.pte in a folder that exists"):
        executorch(layer, (x,), tmp_path / "model.onnx")
    with pytest.raises(ArgumentError, match=r"module\.float\(\)"):
        executorch(layer, (x.bfloat16(),), tmp_path / "model.pte")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ExportError, match=r"executorch.*pip install 'bitport\[executorch\]'"):
        executorch(layer_of("int8-dyn"), (torch.ones(2, K),), tmp_path / "model.pte")


def outputs(path: Path, *inputs: Tensor) -> list[Tensor]:
    lib: Any = pytest.importorskip("executorch.extension.pybindings.portable_lib")
    return [each.clone() for each in lib._load_for_executorch(str(path)).forward(inputs)]


def run(path: Path, *inputs: Tensor) -> Tensor:
    return outputs(path, *inputs)[0]


@pytest.mark.peers
@pytest.mark.parametrize("scheme", TAKEN)
def test_a_layer_is_xnnpacks_and_rounds_its_input_alone(scheme: str, tmp_path: Path) -> None:
    """A row of x is rounded in steps of (largest - smallest) / 255: off by half a step, and at the ends by another half
    for the zero point. Errors spread evenly over a step have the variance 1 / 12, far more than the float32 sum adds;
    over 64 rows, each with K errors of its own, the mean of the squares lies within a tenth of it."""
    layer, path = layer_of(scheme), tmp_path / "layer.pte"
    rows = torch.export.Dim("rows", min=1, max=64)
    report = executorch(layer, (torch.randn(4, K),), path, ({0: rows},))
    assert report["taken"]["aten::linear"] == 1
    assert not [name for name in report["left"] if "linear" in name or "quantize" in name]
    weight, noise = exact(layer.weight), []
    for count in (1, 64):
        x = torch.randn(count, K, generator=torch.Generator().manual_seed(count))
        off = run(path, x).double() - (x.double() @ weight.T + layer.bias.double())
        step = (x.amax(1) - x.amin(1)).double()[:, None] / 255
        assert torch.all(off.abs() <= 1.001 * step * weight.abs().sum(1))
        noise = (off / (step * weight.norm(dim=1))).square()
    assert 0.8 / 12 < noise.mean() < 1.2 / 12


@pytest.mark.peers
@pytest.mark.parametrize("k", [1, 3, 33])
def test_rows_of_an_odd_number_of_codes(k: int, tmp_path: Path) -> None:
    """Two codes share a byte. Bounds as above: half a step, and another half at the ends."""
    layer, path = nn.Linear(k, 5).bfloat16().eval(), tmp_path / "layer.pte"
    bp.quantize_(layer, "int4-int8-channel", measure=False)
    layer, rows = layer.float(), torch.export.Dim("rows", min=1, max=8)
    assert executorch(layer, (torch.randn(4, k),), path, ({0: rows},))["taken"]["aten::linear"] == 1
    weight = exact(layer.weight)
    for count in (1, 5):
        x = torch.randn(count, k, generator=torch.Generator().manual_seed(count))
        step = (x.amax(1).clamp(min=0) - x.amin(1).clamp(max=0)).double()[:, None] / 255
        off = run(path, x).double() - (x.double() @ weight.T + layer.bias.double())
        assert torch.all(off.abs() <= 1.001 * step * weight.abs().sum(1) + 2.0**-22)


@pytest.mark.peers
@pytest.mark.parametrize("scheme", TAKEN)
def test_a_recurrent_cell(scheme: str, tmp_path: Path) -> None:
    """Bounds as above for the sum of both products. The slope of a sigmoid is at most 1/4, and 1 that of tanh; both are
    at most 1. So the cell f c + i g is off by |c| df/4 + di/4 + dg, and the state o tanh(cell) by that and do/4."""
    layer, path = nn.LSTMCell(K, 64).bfloat16().eval(), tmp_path / "cell.pte"
    bp.quantize_(layer, {"*": scheme}, measure=False)
    layer = layer.float()
    numbers = torch.Generator().manual_seed(0)
    x, state, cell = (torch.randn(5, size, generator=numbers) for size in (K, 64, 64))
    assert executorch(layer, (x, (state, cell)), path)["taken"]["aten::linear"] == 2
    gates, off = layer.bias_ih.double() + layer.bias_hh.double(), torch.zeros(())
    for given, weight in ((x, exact(layer.weight_ih)), (state, exact(layer.weight_hh))):
        gates = gates + given.double() @ weight.T
        off = off + 1.001 * (given.amax(1) - given.amin(1)).double()[:, None] / 255 * weight.abs().sum(1)
    (i, f, g, o), (di, df, dg, do) = gates.chunk(4, 1), off.chunk(4, 1)
    wanted = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    bound = cell.abs() * df / 4 + di / 4 + dg
    made, kept = outputs(path, x, state, cell)
    assert torch.all((kept.double() - wanted).abs() <= bound + 2.0**-20)
    assert torch.all((made.double() - o.sigmoid() * wanted.tanh()).abs() <= bound + do / 4 + 2.0**-20)


@pytest.mark.peers
def test_a_table_whose_columns_are_in_another_order(tmp_path: Path) -> None:
    table, path, ids = nn.Embedding(N, K).bfloat16(), tmp_path / "table.pte", torch.tensor([3, 0, 47])
    bp.quantize_(table, {"*": "int8-dyn"}, measure=False)
    order = torch.randperm(K, generator=torch.Generator().manual_seed(0))
    table = table.float()
    table.weight = nn.Parameter(table.weight.replace(perm=order.int(), pre_scale=torch.rand(K) + 0.5), False)
    executorch(table, (ids,), path)
    assert torch.equal(run(path, ids), table(ids))
    assert torch.equal(table(ids), table.weight.dequantize()[ids])


@pytest.mark.peers
@pytest.mark.parametrize("scheme", TAKEN)
def test_the_file_holds_our_codes(scheme: str, tmp_path: Path) -> None:
    """Byte for byte, 4-bit codes as stored in "plain". Changing one code by one step changes one output by that
    step."""
    layer, path = layer_of(scheme, bias=False), tmp_path / "layer.pte"
    x = torch.zeros(1, K)
    x[0, 2] = 1.0
    size = executorch(layer, (x,), path)["files"]["layer.pte"]
    parts, wide = layer.weight.plain(), scheme == "int8-dyn"
    codes = (parts.data ^ 0x80 if wide else parts.data).numpy().tobytes()
    assert size == path.stat().st_size < len(codes) + parts.scale.nbytes + 6144
    file = bytearray(path.read_bytes())
    assert file.count(codes) == 1
    before, at = run(path, x), file.index(codes)
    changed = 2 if wide else 1
    up = -1 if file[at + changed] & 15 == (7 if wide else 15) else 1
    file[at + changed] = (file[at + changed] + up) % 256
    path.write_bytes(file)
    step = torch.zeros(1, N)
    step[0, 0] = up * float(parts.scale[0, 0])
    torch.testing.assert_close(run(path, x) - before, step, rtol=2.0**-14, atol=1e-7)


@pytest.mark.peers
@pytest.mark.parametrize("scheme", ["int3", "int4", "int8-dyn", "nf4"])
def test_a_decomposed_program(scheme: str, tmp_path: Path) -> None:
    """In float32: a value has two roundings, a product one, and the sum at most one for each of its K."""
    exir: Any = pytest.importorskip("executorch.exir")
    layer, path, x = nn.Linear(K, N).eval(), tmp_path / "layer.pte", torch.randn(3, K)
    bp.quantize_(layer, scheme, measure=False)
    path.write_bytes(exir.to_edge(decomposed(layer, (x,))).to_executorch().buffer)
    act, weight = layer.weight.scheme.act, layer.weight.dequantize(torch.float64)
    rounded = (fake_quantize(x, act) if act else x).double()
    expected = rounded @ weight.T + layer.bias.double()
    budget = 2.0**-24 * (K + 4) * (rounded.abs() @ weight.abs().T + layer.bias.abs().double())
    assert torch.all((run(path, x).double() - expected).abs() <= budget)
