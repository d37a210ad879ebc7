"""The ops inside PyTorch's tracers: opcheck, torch.compile, torch.export, decompositions and vmap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import bitport
from bitport.ops import OPS, Op, Sample
from bitport.schemes import preset
from bitport.tensor import quantize_tensor

from .made import samples

PICKED = ("rows", "batch", "matrix", "uneven", "rest")


def picked(op: Op, count: int) -> list[Sample]:
    """A few non-empty samples that differ in scheme and kind of input."""
    dtype = torch.bfloat16
    full = [s for s in samples(op.name, dtype) if s.args[0].numel()]
    chosen = [s for s in full if s.name.split("-")[-1] in PICKED] or full
    return chosen[:: max(1, len(chosen) // count)][:count]


CASES = [pytest.param(op, sample, id=f"{op.name}-{sample.name}") for op in OPS.values() for sample in picked(op, 2)]


@pytest.mark.parametrize(("op", "sample"), CASES)
def test_opcheck(op: Op, sample: Sample) -> None:
    args = sample.args
    if op.backward is not None or op.composed:
        args = (args[0].clone().requires_grad_(), *args[1:])
    results = torch.library.opcheck(op.overload, args, test_utils=CHECKS if comparable(args) else CHECKS[1:])
    assert set(results.values()) == {"SUCCESS"}


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def comparable(args: tuple[Any, ...]) -> bool:
    """torch's test_schema compares inputs before and after with allclose, which float8 does not have."""
    return not any(isinstance(arg, Tensor) and arg.is_floating_point() and arg.dtype.itemsize == 1 for arg in args)


@pytest.mark.parametrize("name", OPS)
def test_compiled_whole_equals_eager(name: str) -> None:
    op, sample = OPS[name], picked(OPS[name], 1)[0]
    torch.compiler.reset()
    run = torch.compile(lambda *args: op.overload(*args), fullgraph=True, backend="aot_eager")
    for got, wanted in zip(_list(run(*sample.args)), _list(op.overload(*sample.args)), strict=True):
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


def _list(result: Any) -> list[Tensor]:
    return result if isinstance(result, list) else [result]


def test_one_graph_serves_every_number_of_rows() -> None:
    weight = quantize_tensor(torch.randn(24, 64), preset("int4-g32"))
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run = torch.compile(lambda x: F.linear(x, weight), fullgraph=True, dynamic=True, backend=counter)
    for rows in (3, 5, 8, 13):
        x = torch.randn(rows, 64)
        assert torch.equal(run(x), F.linear(x, weight))
    assert counter.frame_count == 1


@pytest.mark.slow
def test_inductor_equals_eager() -> None:
    weight = quantize_tensor(torch.randn(24, 72), preset("int4-g32"))
    torch.compiler.reset()
    run = torch.compile(lambda x: F.relu(F.linear(x, weight)) * 2, fullgraph=True)
    x = torch.randn(5, 72)
    torch.testing.assert_close(run(x), F.relu(F.linear(x, weight)) * 2, rtol=1e-5, atol=1e-6)


class Layer(torch.nn.Module):
    def __init__(self, scheme: str) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 24)
        bitport.quantize_(self, scheme)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x))


def exported(layer: torch.nn.Module) -> torch.export.ExportedProgram:
    rows = torch.export.Dim("rows", min=2, max=512)
    return torch.export.export(layer, (torch.randn(3, 64),), dynamic_shapes=({0: rows},))


@pytest.mark.parametrize("scheme", ["int4-g32", "int8-dyn", "mxfp4"])
def test_an_exported_program_holds_the_op_and_serves_every_number_of_rows(scheme: str) -> None:
    layer = Layer(scheme)
    program = exported(layer)
    op = "dyn_linear" if preset(scheme).act else "linear"
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert OPS[op].overload in called
    for rows in (2, 7):
        x = torch.randn(rows, 64)
        assert torch.equal(program.module()(x), layer(x))


@pytest.mark.parametrize("scheme", ["int4-g32", "int8-dyn", "nvfp4"])
def test_decomposed_to_aten_alone(scheme: str) -> None:
    layer = Layer(scheme)
    program = exported(layer).run_decompositions(bitport.decompositions())
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not [name for name in called if name.startswith("bitport")]
    x = torch.randn(7, 64)
    torch.testing.assert_close(program.module()(x), layer(x), rtol=1e-5, atol=1e-5)


def test_every_op_has_a_decomposition() -> None:
    assert set(bitport.decompositions()) >= {op.overload for op in OPS.values()}


@pytest.mark.parametrize("name", ["grouped_linear", "dyn_grouped_linear"])
def test_the_traced_form_of_a_grouped_product_equals_the_generic_one(name: str) -> None:
    """The generic kernel reads the data, its decomposition must not."""
    op = OPS[name]
    assert op.decomposition is not None
    for sample in samples(op.name, torch.float32)[:9]:
        torch.testing.assert_close(op.decomposition(*sample.args), op.generic(*sample.args), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", ["linear", "quantized_matmul"])
def test_vmap_over_the_input(name: str, dim: int) -> None:
    op, sample = OPS[name], picked(OPS[name], 1)[0]
    x = torch.randn(4, 3, sample.args[0].shape[-1]).movedim(0, dim)
    rest = sample.args[1:]
    wanted = torch.stack([op.overload(row, *rest) for row in x.unbind(dim)])
    mapped = torch.vmap(lambda row: op.overload(row, *rest), in_dims=dim)(x)
    # With another number of rows the same sums of K products may be added in another order.
    allowed = x.shape[-1] * torch.finfo(x.dtype).eps * float(wanted.abs().max())
    torch.testing.assert_close(mapped, wanted, rtol=0, atol=allowed)


def test_vmap_over_ids(capfd: pytest.CaptureFixture[str]) -> None:
    """In one call: torch warns when it falls back to a loop over the batch."""
    table = quantize_tensor(torch.randn(50, 64), preset("int4-g32"))
    ids = torch.arange(24).reshape(2, 3, 4)
    for dim in (0, 2):
        wanted = F.embedding(ids.movedim(dim, 0), table)
        assert torch.equal(torch.vmap(lambda each: F.embedding(each, table), in_dims=dim)(ids), wanted)
    assert "bitport::embedding" not in capfd.readouterr().err


@pytest.mark.parametrize("scheme", ["fp8", "nvfp4"])
def test_vmap_rounds_each_input_by_itself(scheme: str) -> None:
    weight = quantize_tensor(torch.randn(24, 64), preset(scheme))
    x = torch.randn(4, 3, 64) * torch.logspace(-2, 2, 4)[:, None, None]
    wanted = torch.stack([F.linear(row, weight) for row in x])
    torch.testing.assert_close(torch.vmap(lambda row: F.linear(row, weight))(x), wanted)


def test_vmap_over_a_weight_is_refused() -> None:
    sample = picked(OPS["linear"], 1)[0]
    x, data, *rest = sample.args
    with pytest.raises(NotImplementedError, match="first argument only"):
        torch.vmap(lambda d: OPS["linear"].overload(x, d, *rest))(torch.stack([data, data]))
