"""bitport on an out-of-tree device: the example package, installed by pip and found by its entry points alone. Run by
test_devices.py, in a separate process."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitport as bp
from bitport import layouts, plugins
from bitport.errors import ArgumentError, BitportError, KernelError
from bitport.evaluate.speed import speeds
from bitport.numerics import sqnr
from bitport.ops import OPS, Sample, Weight, use_kernel
from bitport.ops.product import operand
from bitport.train import convert_, prepare_
from tests.backends.products import products, shortfall
from tests.turns import turns

SIM = torch.device("sim:0")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HELD = ("int4", "int4-g32-sym", "int4-channel", "int8", "int8-asym", "int8-g64")
"""Schemes that the device's own kernel takes."""

plugins.load()
import bitport_simdev as sim  # noqa: E402


@pytest.fixture(autouse=True)
def counters() -> Iterator[None]:
    sim.reset()
    yield
    sim.allow_fallback(True)


def moved(args: tuple[Any, ...], device: torch.device = SIM) -> tuple[Any, ...]:
    return tuple(arg.to(device) if isinstance(arg, Tensor) else arg for arg in args)


def model(*schemes: str) -> nn.Sequential:
    """A few bfloat16 layers, each in its own scheme."""
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for scheme in schemes:
        linear = nn.Linear(256, 256, dtype=torch.bfloat16)
        static = {"act_scale": torch.full((1, 1), 0.05)} if bp.preset(scheme).static else {}
        q = bp.quantize_tensor(linear.weight, bp.preset(scheme), **static)
        linear.weight = nn.Parameter(q, requires_grad=False)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers)


def same(a: nn.Module, b: nn.Module) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name].cpu(), theirs[name].cpu()) for name in mine)


# -- how it got here -------------------------------------------------------------------------------------------------


def test_found_by_its_entry_points() -> None:
    assert "sim" in plugins.load()
    assert "site" in Path(sim.__file__).parts[-3]
    assert layouts.LAYOUTS["sim_rows8"].devices == ("sim",)
    assert torch.accelerator.current_accelerator() == torch.device("sim")


# -- its own kernel --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fallback", [True, False], ids=["", "no-fallback"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("scheme", HELD)
def test_its_kernel_computes(scheme: str, dtype: torch.dtype, fallback: bool) -> None:
    """The kernel counts each call, hands none back, and no op falls back to the CPU."""
    for n, k in ((24, 72), (13, 256)):
        here = products(scheme, dtype, "sim_rows8", n, k)
        samples = [Sample(s.name, moved(s.args), s.expected, s.budget) for s in here]
        before = [moved(sample.args, torch.device("cpu")) for sample in samples]
        sim.reset()
        sim.allow_fallback(fallback)
        got = [torch.ops.bitport.linear(*sample.args) for sample in samples]
        assert (sim.kernel_calls(), sim.handed_back(), sim.fallbacks()) == (len(samples), 0, {})
        sim.allow_fallback(True)
        for sample, y, args in zip(samples, got, before, strict=True):
            assert y.device == SIM
            assert y.dtype == dtype
            assert shortfall(sample, y.cpu()) <= 0, sample.name
            for old, now in zip(args, sample.args, strict=True):
                assert not isinstance(old, Tensor) or torch.equal(old, now.cpu()), f"{sample.name}: written to"


def test_an_op_without_a_kernel_fails_where_the_fallback_is_off() -> None:
    q = bp.quantize_tensor(torch.randn(8, 64), bp.preset("int4")).to(SIM)
    x = torch.randn(2, 64).to(SIM)
    sim.allow_fallback(False)
    assert F.linear(x, q).shape == (2, 8)
    with pytest.raises(NotImplementedError, match=r"sim: no kernel for aten::.*, and the CPU fallback is switched off"):
        torch.relu(x)


@pytest.mark.parametrize("scheme", ["int4-fzero", "int4-b4x64", "int3", "nf4"])
def test_what_it_does_not_take_it_hands_back(scheme: str) -> None:
    weight = torch.randn(24, 128)
    q = bp.quantize_tensor(weight, bp.preset(scheme))
    x = torch.randn(5, 128)
    y = F.linear(x.to(SIM), q.to(SIM))
    assert (sim.kernel_calls(), sim.handed_back()) == (0, 1)
    assert float(sqnr(F.linear(x, q.dequantize()), y.cpu())) > 120


WRONG: dict[str, tuple[dict[int, Any], str]] = {
    # changed arguments (by position: x, data, scale, zero, scale2, dtype, n, k, block_n, block_k, layout, bias)
    "x-on-the-cpu": ({0: torch.ones(5, 128)}, "x is on cpu, the weight on sim:0"),
    "data-on-the-cpu": ({1: torch.zeros(3, 128, 4, dtype=torch.uint8)}, "x is on sim:0, the weight on cpu"),
    "bias-on-the-cpu": ({11: torch.ones(24)}, "bias is on cpu, x on sim:0"),
    "another-sim": ({0: torch.ones(5, 128).to("sim:1")}, "x is on sim:1, the weight on sim:0"),
    "x-too-short": ({0: torch.ones(5, 100).to(SIM)}, "x must have shape"),
    "x-no-rank": ({0: torch.ones((), device=SIM)}, "x must have shape"),
    "x-integer": ({0: torch.ones(5, 128, dtype=torch.int32).to(SIM)}, "x must be float32, bfloat16 or float16"),
    "data-too-small": ({1: torch.zeros(2, 128, 4, dtype=torch.uint8).to(SIM)}, "needs data"),
    "data-of-floats": ({1: torch.zeros(3, 128, 4).to(SIM)}, "needs data"),
    "scale-too-small": ({2: torch.ones(1, 24).to(SIM)}, "need a float scale"),
    "scale-of-ints": ({2: torch.ones(4, 24, dtype=torch.int32).to(SIM)}, "need a float scale"),
    "zero-too-small": ({3: torch.zeros(24, 3, dtype=torch.uint8).to(SIM)}, "zero must be"),
    "n-too-large": ({6: 1 << 40}, "needs data"),
    "k-too-large": ({7: 1 << 40}, "x must have shape"),
    "n-negative": ({6: -8}, "sizes must be positive"),
    "block-zero": ({9: 0}, "sizes must be positive"),
    "unknown-dtype": ({5: "int99"}, "unknown number type"),
    "bias-of-ints": ({11: torch.ones(24, dtype=torch.int32).to(SIM)}, "bias must be float"),
    "x-float64": ({0: torch.ones(5, 128, dtype=torch.float64).to(SIM)}, "x must be float32, bfloat16 or float16"),
    "bias-too-long": ({11: torch.ones(25).to(SIM)}, "bias must be float"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_get_bitports_own_errors(case: str) -> None:
    changes, message = WRONG[case]
    q = bp.quantize_tensor(torch.randn(24, 128), bp.preset("int4-g32")).to(SIM)
    args = [torch.ones(5, 128).to(SIM), *operand(q), None]
    with pytest.raises(BitportError, match=message):
        torch.ops.bitport.linear(*(changes.get(at, arg) for at, arg in enumerate(args)))
    assert sim.kernel_calls() == 0


@pytest.mark.parametrize(("x_at", "weight_at"), [("cpu", "sim"), ("sim", "cpu"), ("sim:0", "sim:1")])
def test_mixed_devices(x_at: str, weight_at: str) -> None:
    q = bp.quantize_tensor(torch.randn(8, 64), bp.preset("int4")).to(weight_at)
    with pytest.raises(ArgumentError, match="move both to one device"):
        F.linear(torch.randn(2, 64).to(x_at), q)


# -- everything else, by the generic kernel --------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "dtype"), turns(OPS, DTYPES))
def test_every_op_on_every_sample(op: str, dtype: torch.dtype) -> None:
    missed = {}
    for sample in OPS[op].samples(SIM, dtype):
        got = OPS[op].overload(*sample.args)
        assert {part.device for part in (got if isinstance(got, list) else [got])} == {SIM}
        if not sample.judged(got)[1] >= 0:
            missed[sample.name] = got
    assert missed == {}


# -- storing and moving ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", bp.PRESETS)
def test_there_and_back_in_every_layout(scheme: str) -> None:
    q = bp.quantize_tensor(torch.randn(24, 256).bfloat16(), bp.preset(scheme))
    here, q = q.bits_layout, q.to_layout("plain")
    own = "sim_rows8" if bp.preset(scheme).weight.dtype in ("int4", "int8") else "plain"
    for name, layout in layouts.LAYOUTS.items():
        if layout.refuses(q.matrix, q.parts) is not None:
            continue
        there = q.to_layout(name).to(SIM)
        assert (there.bits_layout, there.device) == (own, SIM)
        across = there.to_layout(name).to("sim:1")
        assert (across.bits_layout, across.device) == (own, torch.device("sim:1"))
        back = across.to("cpu")
        assert back.bits_layout == here
        assert torch.equal(back, q), name
        assert torch.equal(there.dequantize(torch.float32).cpu(), q.dequantize(torch.float32))


def test_model_there_and_back() -> None:
    here, x = model("int4", "int8", "int4-g32-sym", "nf4", "mxfp8-wo"), torch.randn(7, 256).bfloat16()
    before = here(x)
    here.to("sim")
    there = here(x.to("sim")).cpu()
    assert sim.kernel_calls() == 3
    assert "bitport::linear" not in sim.fallbacks()
    assert float(sqnr(before, there)) > 40
    here.to("cpu")
    assert torch.equal(here(x), before)


def test_under_autocast() -> None:
    there, x = model("int4", "int8-dyn").to("sim"), torch.randn(7, 256).to("sim")
    with torch.autocast("sim", torch.bfloat16):
        y = there(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y.cpu(), there(x.bfloat16()).cpu())


def test_on_the_second_device() -> None:
    """The memory of a tensor that is resized, as results of structured ops are, stays on its device."""
    here, x = model("int4", "int8-dyn", "nf4", "mxfp8").to("sim:0"), torch.randn(7, 256).bfloat16()
    before = here(x.to("sim:0"))
    after = here.to("sim:1")(x.to("sim:1"))
    assert after.device == torch.device("sim:1")
    assert torch.equal(after.cpu(), before.cpu())
    assert torch.ones(3).to("sim:1").abs().untyped_storage().device == torch.device("sim:1")


@pytest.mark.parametrize(("source", "target"), [("cpu", "sim"), ("sim", "cpu"), ("sim:0", "sim:1")])
def test_saved_and_loaded_elsewhere(source: str, target: str) -> None:
    here = model(*bp.PRESETS).to(source)
    file = io.BytesIO()
    torch.save(here.state_dict(), file)
    file.seek(0)
    state = torch.load(file, map_location=target, weights_only=True)
    assert {value.device.type for value in state.values()} == {torch.device(target).type}
    wanted = model(*bp.PRESETS).to(target)
    loaded = copy.deepcopy(wanted)
    loaded.load_state_dict(state, assign=True)
    assert same(loaded, here)
    assert [layer.weight.bits_layout for layer in loaded[::2]] == [layer.weight.bits_layout for layer in wanted[::2]]


@pytest.mark.parametrize(("source", "target"), [("cpu", "sim"), ("sim", "cpu")])
def test_state_dict_copied_across(source: str, target: str) -> None:
    here, other = model("int4", "int8").to(source), model("int4", "int8")
    with torch.no_grad():
        other[0].weight.qdata.zero_()
    other.to(target)
    assert not same(other, here)
    other.load_state_dict(here.state_dict())
    assert same(other, here)
    assert other[0].weight.device.type == target


@pytest.mark.parametrize(("source", "target"), [("cpu", "sim"), ("sim", "cpu")])
def test_checkpoint(source: str, target: str, tmp_path: Path) -> None:
    here = model(*bp.PRESETS).to(source)
    bp.save(here, tmp_path)
    loaded = bp.load(model(*bp.PRESETS), tmp_path, device=target)
    assert loaded[0].weight.device.type == target
    assert same(loaded, here)


def test_quantized_there() -> None:
    here = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 32))
    there = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 32))
    there.load_state_dict(here.state_dict())
    bp.quantize_(here, "int4-g32")
    bp.quantize_(there.to("sim"), "int4-g32")
    assert same(here, there)
    assert there[0].weight.bits_layout == "sim_rows8"


# -- explained, traced, differentiated -------------------------------------------------------------------------------


def test_explained() -> None:
    explanation = bp.explain(model("int4", "mxfp4").to("sim"), rows=(1, 64))
    first, second = explanation.layers
    assert {decision.kernel for decision in first.decisions.values()} == {"sim's own (dispatcher)"}
    assert {decision.kernel for decision in second.decisions.values()} == {"generic"}
    assert "sim's own (dispatcher)" in str(explanation)
    assert "sim_rows8" in str(explanation)
    there, x = model("int4").to("sim"), torch.ones(1, 256, dtype=torch.bfloat16, device=SIM)
    with use_kernel("linear=own"), pytest.raises(KernelError, match="sim has at the dispatcher has no name"):
        there(x)


def test_measured() -> None:
    """``bitport bench`` synchronizes the device through torch.accelerator."""
    rows = speeds(256, 64, (1,), ("int4",), device=SIM, repetitions=1)
    assert [row.kernel for row in rows] == ["sim's own (dispatcher)"]


def test_compiled() -> None:
    here, x = model("int4", "int8-dyn").to("sim"), torch.randn(7, 256).bfloat16().to("sim")
    compiled = torch.compile(here, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x).cpu(), here(x).cpu())
    assert sim.kernel_calls() == 2


def test_exported() -> None:
    here, x = model("int4", "int8-dyn").to("sim"), torch.randn(7, 256).bfloat16().to("sim")
    exported = torch.export.export(here, (x,), dynamic_shapes=({0: torch.export.Dim("m", min=2)},))
    called = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert "bitport.linear.default" in called
    assert "bitport.dyn_linear.default" in called
    assert torch.equal(exported.module()(x[:3]).cpu(), here(x[:3]).cpu())


@pytest.mark.parametrize("op", ["linear", "dyn_linear", "dequantize", "embedding"])
def test_opcheck(op: str) -> None:
    sample = next(iter(OPS[op].samples(SIM, torch.float32)))
    torch.library.opcheck(OPS[op].overload, sample.args)


def test_opcheck_of_its_kernel() -> None:
    q = bp.quantize_tensor(torch.randn(24, 128), bp.preset("int4-g32")).to(SIM)
    torch.library.opcheck(torch.ops.bitport.linear.default, (torch.randn(5, 128).to(SIM), *operand(q), None))
    assert sim.kernel_calls() > 0


def test_gradient() -> None:
    q = bp.quantize_tensor(torch.randn(24, 128), bp.preset("int4-g32"))
    x = torch.randn(5, 128, requires_grad=True)
    there = x.detach().to(SIM).requires_grad_()
    F.linear(x, q).square().sum().backward()
    F.linear(there, q.to(SIM)).square().sum().backward()
    assert sim.kernel_calls() == 1
    assert x.grad is not None
    assert there.grad is not None
    assert float(sqnr(x.grad, there.grad.cpu())) > 120


def test_its_layout_elsewhere() -> None:
    """Any device can read any layout: the CPU computes with a weight in the layout of sim."""
    q = bp.quantize_tensor(torch.randn(24, 128), bp.preset("int4-g32"))
    x = torch.randn(5, 128)
    assert torch.equal(F.linear(x, q.to_layout("sim_rows8")), F.linear(x, q.to_layout("plain")))
    assert isinstance(operand(q), Weight)


@pytest.mark.parametrize(
    ("scheme", "gradients"),
    [("int4-g32", None), ("int8-dyn", "int8"), ("fp8", "fp8"), ("mxfp8", "mxfp8"), ("nf4", None)],
)
def test_training(scheme: str, gradients: str | None) -> None:
    """Three steps on the device and on the CPU from the same weights give the same model, up to float32 rounding."""
    torch.manual_seed(2)
    here = nn.Sequential(nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 32))
    there = copy.deepcopy(here).to(SIM)
    x, want = torch.randn(16, 128), torch.randn(16, 32)
    losses = []
    for model in (here, there):
        prepare_(model, scheme, gradients=gradients)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        device = next(model.parameters()).device
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x.to(device)), want.to(device))
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
        convert_(model)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    with torch.no_grad():
        assert float(sqnr(here(x), there(x.to(SIM)).cpu())) > 40
    if scheme == "int4-g32":
        assert sim.kernel_calls() > 0
