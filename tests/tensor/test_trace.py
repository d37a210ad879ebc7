"""Modules with quantized weights inside torch.compile and torch.export, for every preset."""

from __future__ import annotations

import copy
import functools
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch._aot_autograd.subclass_parametrization import unwrap_tensor_subclass_parameters
from torch._higher_order_ops.while_loop import while_loop
from torch._subclasses.fake_tensor import FakeTensorMode

import bitport
from bitport.errors import ArgumentError
from bitport.numerics import Quantized, sqnr
from bitport.schemes import KINDS, PRESETS, preset
from bitport.tensor import QTensor, cache_key, from_parts, quantize_tensor
from tests.versions import since


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        self.up = nn.Linear(64, 96)
        self.down = nn.Linear(96, 64, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.down(torch.relu(self.up(x))) + x @ self.down.weight @ self.down.weight.t()


def quantized(scheme: str) -> nn.Module:
    model = Small()
    ids = torch.arange(8).reshape(2, 4)
    recipe = {"embed": "int8", "*": scheme}
    bitport.quantize_(model, recipe, calibrate=[ids] if preset(scheme).static else None)
    return model.eval()


@pytest.mark.parametrize("scheme", PRESETS)
def test_compiled_whole(scheme: str) -> None:
    model, ids = quantized(scheme), torch.arange(6).reshape(2, 3)
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(ids)
    torch.testing.assert_close(compiled, model(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scheme", ["int4-g32", "int8-dyn"])
def test_a_layer_compiled_in_place(scheme: str) -> None:
    """Dynamo then traces into F.linear on a QTensor, which it otherwise keeps as one call."""
    layer, x = nn.Linear(64, 96), torch.randn(3, 64)
    bitport.quantize_(layer, scheme)
    wanted = layer(x)
    torch.compiler.reset()
    layer.compile(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(layer(x), wanted, rtol=1e-5, atol=1e-5)


def test_attributes_that_are_read_where_nothing_is_compiled() -> None:
    """As torch.nn reads those of the weights of a GRU. Dynamo compiled each such read, and took the code of one for
    another: 'torch.dtype' object has no attribute 'type'."""
    layer = nn.GRU(16, 16)
    bitport.quantize_(nn.ModuleDict({"layer": layer}), [("*", "int8", KINDS)])
    model, x = nn.Sequential(nn.Linear(16, 16), layer), torch.randn(3, 2, 16)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager")(x)[0]
    torch.testing.assert_close(compiled, model(x)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scheme", PRESETS)
def test_exported(scheme: str) -> None:
    model = quantized(scheme)
    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(model, (torch.arange(6).reshape(2, 3),), dynamic_shapes=({0: rows},))
    ids = torch.arange(12).reshape(4, 3)
    torch.testing.assert_close(program.module()(ids), model(ids), rtol=1e-5, atol=1e-5)


def saved_and_loaded(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


def savable(scheme: str) -> Any:
    """PyTorch 2.11 has no number for e8m0 in the files of its programs."""
    return pytest.param(scheme, marks=since("2.12")) if preset(scheme).weight.scale == "e8m0" else scheme


@pytest.mark.parametrize("scheme", map(savable, PRESETS))
def test_an_exported_program_is_saved_and_loaded(scheme: str) -> None:
    model, ids = quantized(scheme), torch.arange(6).reshape(2, 3)
    program = saved_and_loaded(torch.export.export(model, (ids,)))
    assert torch.equal(program.module()(ids), model(ids))


def test_a_saved_program_on_a_machine_with_other_layouts() -> None:
    """Weights are packed anew when they are read; their parts, which the other program holds, are not."""
    model, ids = quantized("int4-g32"), torch.arange(6).reshape(2, 3)
    for layer in model.children():
        layer.weight = nn.Parameter(layer.weight.to_layout("plain"), requires_grad=False)
    program = torch.export.export(model, (ids,))
    with pytest.raises((ArgumentError, RuntimeError), match=r"in layout plain needs data|torch has printed why"):
        saved_and_loaded(program).module()(ids)
    assert torch.equal(saved_and_loaded(program.run_decompositions({})).module()(ids), model(ids))


def test_an_exported_program_becomes_modules_again() -> None:
    model, x = nn.Sequential(nn.Linear(64, 32), nn.Sequential(nn.Linear(32, 64), nn.ReLU())).eval(), torch.randn(3, 64)
    bitport.quantize_(model, {"*": "int4-g32"}, measure=False)
    program = torch.export.export(model, (x,)).run_decompositions({})  # PyTorch does not unflatten subclasses
    modules = torch.export.unflatten(program)
    assert torch.equal(modules(x), model(x))
    first = modules.get_submodule("0")(x)
    assert torch.equal(modules.get_submodule("1")(first), model(x))


class Repeated(nn.Module):
    """The same layers for all, as PyTorch's ops with functions as arguments compute them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(64, 64), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "cond":
            return torch.cond(x.sum() > 0, lambda x: self.layer(x), lambda x: x * 2, (x,))
        if self.how == "while_loop":
            return while_loop(lambda at, x: at < 3, lambda at, x: (at + 1, self.layer(x)), (torch.tensor(0), x))[1]
        return REGION(self.layer, REGION(self.layer, x))


REGION = torch.compiler.nested_compile_region(lambda layer, x: layer(x))


@pytest.mark.parametrize("how", ["cond", "while_loop", pytest.param("nested_compile_region", marks=since("2.12"))])
def test_functions_that_pytorch_calls(how: str) -> None:
    """They take no tensor subclasses, but weights as PyTorch unwraps them."""
    model, x = Repeated(how).eval(), torch.rand(3, 64)
    bitport.quantize_(model, {"*": "int4-g32"}, measure=False)
    times = {"cond": 1, "while_loop": 3, "nested_compile_region": 2}[how]
    wanted = functools.reduce(lambda y, _: model.layer(y), range(times), x)
    model = unwrap_tensor_subclass_parameters(model)
    torch.compiler.reset()
    with torch.no_grad():
        for run in (
            torch.compile(model, fullgraph=True, backend="aot_eager"),
            torch.export.export(model, (x,)).module(),
        ):
            torch.testing.assert_close(run(x), wanted, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_blocks_that_are_compiled_in_place_share_one_graph() -> None:
    model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), torch.rand(3, 64)
    bitport.quantize_(model, {"*": "int4-g32"}, measure=False)
    wanted = model(x)
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for block in model:
        block.compile(fullgraph=True, backend=counter)
    torch.testing.assert_close(model(x), wanted, rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1


@pytest.mark.parametrize("scheme", ["int4-g32", "int8-dyn", "fp8", "nvfp4"])
def test_a_number_of_rows_that_a_tensor_holds(scheme: str) -> None:
    layer, x = nn.Linear(64, 32), torch.randn(8, 64)
    bitport.quantize_(layer, scheme, measure=False)

    def run(x: Tensor, rows: Tensor) -> Tensor:
        return layer(x[: rows.item()])

    torch.compiler.reset()
    with torch.no_grad(), torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        for rows in (5, 0, 1, 8):
            assert torch.equal(compiled(x, torch.tensor(rows)), run(x, torch.tensor(rows)))


def test_compiled_training_of_what_is_not_quantized() -> None:
    """Gradients reach a float layer below quantized ones, as in eager mode."""
    below = nn.Linear(16, 64)
    above = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
    bitport.quantize_(above, "int4-g32")
    x = torch.randn(5, 16)
    torch.compiler.reset()
    grads = []
    for run in (lambda: above(below(x)), torch.compile(lambda: above(below(x)), fullgraph=True, backend="aot_eager")):
        below.zero_grad()
        run().square().sum().backward()
        grads.append(below.weight.grad.clone())
    torch.testing.assert_close(*grads)


def test_a_compiled_model_sees_new_numbers() -> None:
    """The weight is an input of the graph, not a constant."""
    model, ids = quantized("int4-g32"), torch.arange(6).reshape(2, 3)
    torch.compiler.reset()
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    before = run(ids)
    model.up.weight.scale.mul_(2)
    after = run(ids)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, model(ids))


def test_a_compiled_model_follows_a_cast() -> None:
    model, ids = quantized("int4-g32"), torch.arange(6).reshape(2, 3)
    torch.compiler.reset()
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert run(ids).dtype == torch.float32
    torch.compiler.reset()
    model.bfloat16()
    assert run(ids).dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("scheme", ["int4-g32", "int8-dyn"])
def test_jit_traced(scheme: str) -> None:
    """The trace holds the products, not their results on the example inputs as constants."""
    model = nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 96), nn.Sigmoid())
    bitport.quantize_(model, {"0": "int8", "*": scheme})
    with torch.no_grad():
        traced = torch.jit.trace(model, torch.arange(6).reshape(2, 3))
        ids = torch.arange(12).reshape(4, 3)
        assert torch.equal(traced(ids), model(ids))


def test_the_key_of_torchs_cache_has_all_that_a_graph_depends_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key covers two shapes of one matrix, strides of parts, and bitport's own source: reusing a cached graph
    across these gives wrong results."""
    tall, wide = (quantize_tensor(torch.ones(8, 4, *size), "int8") for size in ((3, 1), (1, 3)))
    whole = quantize_tensor(torch.ones(8, 24), "int8-g4-asym").to_layout("plain")
    piece = whole[:, :12]
    packed = piece.map_parts(Tensor.contiguous)
    keys = [q._stable_hash_for_caching() for q in (tall, wide, piece, packed)]
    (tmp_path / "a.py").write_text("other = 1")
    monkeypatch.setattr(cache_key, "PACKAGE", tmp_path)
    cache_key.source_key.cache_clear()
    keys.append(packed._stable_hash_for_caching())
    cache_key.source_key.cache_clear()
    assert len(set(keys)) == len(keys)


def test_a_copy_of_an_exported_model_moves() -> None:
    """As docs/deploy.md says: after torch.export, PyTorch cannot move a tensor subclass in place."""
    model, ids = quantized("int4"), torch.arange(8).reshape(2, 4)
    torch.export.export(model, (ids,))
    y = copy.deepcopy(model).to(torch.bfloat16)(ids)
    assert y.dtype == torch.bfloat16
    assert sqnr(model(ids), y) > 30  # bfloat16 has 8 bits: errors of 2^-9 in each number, and in sums over a few layers


def test_a_cast_that_changes_nothing_is_exported() -> None:
    class Casting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight.to(x.dtype), self.bias)

    model, x = nn.Sequential(Casting(64, 32)), torch.randn(3, 64)
    bitport.quantize_(model, {"*": "int4-g32"}, measure=False)
    for strict in (False, True):
        assert torch.equal(torch.export.export(model, (x,), strict=strict).module()(x), model(x))


class Gated(nn.Module):
    """Between its products are several operators, whose exact results eager mode rounds to bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(64, 128), nn.Linear(64, 128), nn.Linear(128, 64)
        self.scale, self.shift = nn.Parameter(torch.rand(64) + 0.5), nn.Parameter(torch.randn(64))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.scale + self.shift
        return x + self.down(F.relu(self.gate(y)) * self.up(y) + self.up(x))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4", "int8-dyn"])
def test_rounded_inputs_in_bfloat16(scheme: str) -> None:
    """Where inductor rounds what lies between products as eager mode does, all bits are equal. By default it does not,
    and inputs near the border of two codes get the other one: another result, and no worse one."""
    model, x = nn.Sequential(Gated(), Gated()).eval(), torch.randn(64, 64).bfloat16()
    model.bfloat16()
    bitport.quantize_(model, scheme, measure=False, progress=False)
    exact = bitport.dequantize_(copy.deepcopy(model)).double()(x.double())
    with torch.no_grad():
        wanted = model(x)
        torch.compiler.reset()
        assert torch.equal(torch.compile(model, options={"emulate_precision_casts": True})(x), wanted)
        torch.compiler.reset()
        made = torch.compile(model)(x)
    assert not torch.equal(made, wanted)
    assert sqnr(exact, made) > sqnr(exact, wanted) - 1  # dB: 4096 numbers with errors that are equal in distribution


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int4-g32", "int8-dyn", "fp8-row"])
def test_inductor(scheme: str) -> None:
    model, ids = quantized(scheme), torch.arange(6).reshape(2, 3)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(model, fullgraph=True)(ids), model(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["mxfp4-wo", "mxfp8"])
def test_inductor_dequantizes_scales_that_are_powers_of_two(scheme: str) -> None:
    """Inductor generates no CPU loops over e8m0, the dtype of these scales in packed layouts."""
    table, stack = quantize_tensor(torch.randn(64, 96), scheme), quantize_tensor(torch.randn(3, 64, 96), scheme)
    conv = quantize_tensor(torch.randn(16, 4, 3, 3), scheme, kind="conv")
    assert {each.bits_layout for each in (table, stack, conv)} == {"cpu_tiles"}

    def run(x: Tensor, image: Tensor) -> tuple[Tensor, ...]:
        pieces = F.linear(x, table[:48]), F.linear(x[..., :32], table[:, :32]), x @ stack[:, :48].mT
        return table.dequantize() + 1, x @ stack.mT, F.conv2d(image, conv), *pieces

    inputs = torch.randn(3, 2, 96), torch.randn(1, 4, 8, 8)
    torch.compiler.reset()
    for made, eager in zip(torch.compile(run, fullgraph=True)(*inputs), run(*inputs), strict=True):
        assert sqnr(eager.double(), made) > 120  # float32 sums in a different order


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(self.attention(x, x, x, need_weights=False)[0])


def test_attention_of_any_length_is_exported() -> None:
    """torch.matmul expands the weight over the batch; a length equal to the weight's 64 must not be specialized."""
    model, length = Attending().eval(), torch.export.Dim("length", max=512)
    bitport.quantize_(model, "int4-g32")
    exported = torch.export.export(model, (torch.randn(2, 5, 64),), dynamic_shapes=({1: length},)).module()
    for size in (5, 64, 192):
        x = torch.randn(2, size, 64)
        torch.testing.assert_close(exported(x), model(x), rtol=1e-4, atol=1e-4)


def test_parts_without_values_are_not_looked_at() -> None:
    q, perm = quantize_tensor(torch.randn(64, 96), "int4-g32").to_layout("plain"), torch.randperm(96)

    def made(perm: Tensor, *parts: Tensor | None) -> QTensor:
        return from_parts(Quantized(*parts), q.scheme, shape=(64, 96), dtype=torch.float32, perm=perm)

    with FakeTensorMode() as mode:
        parts = [None if part is None else mode.from_tensor(part) for part in q.parts]
        assert made(mode.from_tensor(perm), *parts).shape == (64, 96)

    def used(x: Tensor, perm: Tensor, *parts: Tensor | None) -> Tensor:
        return F.linear(x, made(perm, *parts))

    x = torch.randn(2, 96)
    compiled = torch.compile(used, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, perm, *q.parts), used(x, perm, *q.parts))
