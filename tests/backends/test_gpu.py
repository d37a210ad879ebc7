"""Tests on a real device (``pytest -m gpu``): every kernel against float64, in graphs, compiled, and under
compute-sanitizer.

They run on whatever accelerator PyTorch finds; tests that need CUDA are skipped elsewhere, with the reason.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bitport as bp
from bench.gpu.accelerator import Accelerator
from bitport import layouts
from bitport.cache import KeyValueStore, StaticStore
from bitport.conformance import run
from bitport.numerics import FLOATS, sqnr
from bitport.ops import IMPLS, OPS, Sample, Weight, decide
from bitport.ops.product import operand
from bitport.schemes import preset
from bitport.tensor import QTensor
from bitport.train import GRADIENTS, convert_, prepare_
from tests.backends.products import products, shortfall

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
FURTHER = {
    **{"int4pack_mm": 2, "int8pack_mm": 1, "scaled_mm_blocks": 1, "scaled_mm_mx": 1},
    **{"dense_mm": 1, "triton_dense": 1},
}
"""Roundings beyond those of a budget (the weight's and the result's): a bias added to a rounded product, the shift of a
zero point in tile-packed layouts, sums of parts of K, which PyTorch lets cuBLAS round, and the weight where it is
rounded including the row's scale, which other kernels apply after the sum."""
SHAPES = ((128, 256), (256, 640), (1024, 2048))
"""Sizes that every kernel takes; the conformance suite has small and odd ones, for the others."""
ROWS = (1, 2, 7, 16, 33, 200, 1024)


@pytest.fixture(autouse=True)
def device() -> torch.device:
    if DEVICE.type == "cpu":
        pytest.skip("PyTorch finds no accelerator here")
    return DEVICE


def allowed(kernel: str) -> float:
    """Allowed dB below a budget."""
    return 10 * math.log10(1 + FURTHER.get(kernel, 0) / 2)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_conformance(op: str, dtype: torch.dtype) -> None:
    """In parts of at most some 200 kernels, each of which takes half a second to compile."""
    failed = {
        f"{row.subject} by {', '.join(row.kernels)}": row.failures
        for row in run(DEVICE, [op], [dtype])
        if row.margin < -max(allowed(kernel) for kernel in row.kernels)
    }
    assert failed == {}


ON_REQUEST = {"cuda": ("tile_packed_2", "tile_packed_4", "tile_packed_8")}
"""Layouts that are not chosen automatically, but have a kernel."""


def there(sample: Sample, act: str) -> Iterator[tuple[Any, ...]]:
    """The sample's arguments on the device, with the weight in each layout that a kernel may want: plain, the preferred
    one, and those on request."""
    args = [arg.to(DEVICE) if isinstance(arg, Tensor) else arg for arg in sample.args]
    weight = Weight(*args[1:11])
    further = [] if torch.version.hip or act else ON_REQUEST.get(DEVICE.type, [])
    for layout in dict.fromkeys(["plain", layouts.preferred(DEVICE, weight.matrix, weight.parts, act), *further]):
        if layouts.layout(layout).refuses(weight.matrix, weight.parts) is None:
            yield (args[0], *weight.to_layout(layout), *args[11:])


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
@pytest.mark.parametrize("scheme", [*bp.PRESETS, "int4-sym", "int4-g32", "int8-g128", "fp8-row-wo", "mxfp4-wo"])
def test_every_kernel_that_takes_it(scheme: str, shape: tuple[int, int]) -> None:
    """Each kernel, not just the chosen one; synchronization is an error where PyTorch can detect it."""
    act = bp.preset(scheme).act
    impls = IMPLS.get(("dyn_linear" if act else "linear", DEVICE.type), [])
    missed, ran = {}, 0
    for m in ROWS:
        for sample in products(scheme, BF16, "plain", *shape, m=m):
            for args, impl in itertools.product(there(sample, act), impls):
                if impl.supports(*args) is None:
                    ran += 1
                    impl.run(*args)  # preparations on the first call may synchronize
                    with waiting_is_an_error():
                        got = impl.run(*args)
                    gap = shortfall(sample, got.cpu())
                    if not gap <= allowed(impl.name):
                        missed[impl.name, args[10], m] = gap
    assert missed == {}
    assert ran >= len(ROWS), "a kernel for every number of rows"


class waiting_is_an_error:
    def __enter__(self) -> None:
        self._set("error")

    def __exit__(self, *_: object) -> None:
        self._set("default")

    @staticmethod
    def _set(mode: str) -> None:
        if DEVICE.type == "cuda":
            torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.parametrize("scheme", bp.PRESETS)
def test_there_and_back(scheme: str) -> None:
    """Quantized on the CPU, moved, and moved back: the same bits. Quantized on the device: the same codes."""
    static = {"act_scale": torch.ones(1, 1)} if bp.preset(scheme).static else {}
    value = torch.randn(256, 512, dtype=BF16)
    q = bp.quantize_tensor(value, bp.preset(scheme), **static)
    back = q.to(DEVICE).to("cpu")
    for one, other in zip(plain(q), plain(back), strict=True):
        assert same_bits(one, other)
    made = bp.quantize_tensor(value.to(DEVICE), bp.preset(scheme), **{k: v.to(DEVICE) for k, v in static.items()})
    codes, expected = (each.view(torch.uint8) for each in (plain(made.to("cpu"))[0], plain(q)[0]))
    assert codes is not None
    assert (codes != expected).double().mean() < 1e-3, "a division may be rounded otherwise; a layout may not differ"


def plain(q: QTensor) -> tuple[Tensor | None, ...]:
    weight = operand(q)
    return tuple(weight.plain())


def same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


def model(scheme: str, width: int = 512, depth: int = 2) -> nn.Module:
    made = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth))).to(BF16)
    batch = torch.randn(4, width, dtype=BF16)
    bp.quantize_(made, scheme, calibrate=[batch] if bp.preset(scheme).static else None, progress=False)
    return made.to(DEVICE).eval()


@pytest.mark.parametrize("rows", [1, 16, 1024])
@pytest.mark.parametrize("scheme", bp.PRESETS)
def test_in_a_graph(scheme: str, rows: int) -> None:
    """Captured once, then replayed with other inputs: nothing of the first run is left in it."""
    made, x = model(scheme), torch.randn(rows, 512, dtype=BF16, device=DEVICE)
    with torch.inference_mode():
        play, y = accelerator().recorded(lambda: made(x))
        for seed in range(2):
            x.copy_(torch.randn(rows, 512, generator=torch.Generator().manual_seed(seed)))
            play()
            played = y.clone()
            torch.testing.assert_close(played, made(x), rtol=2**-6, atol=2**-6)
            assert played.isfinite().all()


def accelerator() -> Accelerator:
    made = Accelerator(DEVICE)
    if not hasattr(made.module, "CUDAGraph") and not hasattr(made.module, "XPUGraph"):
        pytest.skip(f"PyTorch has no graphs for {DEVICE.type}")
    return made


@pytest.mark.parametrize("scheme", ["int4", "nf4", "mxfp4-wo", "fp8-row"])
def test_experts_in_a_graph(scheme: str) -> None:
    """With bounds that change between two replays."""
    weight = torch.randn(4, 256, 512, dtype=BF16) * 0.05
    q = bp.quantize_tensor(weight, bp.preset(scheme)).to(DEVICE)
    x = torch.randn(64, 512, dtype=BF16, device=DEVICE)
    ends = torch.tensor([16, 32, 48, 64], dtype=torch.int32, device=DEVICE)
    act = [bp.preset(scheme).act] if bp.preset(scheme).act else []
    op = OPS["dyn_grouped_linear" if act else "grouped_linear"]
    if (kernel := decide(op.name, x, ends, *operand(q), *act).kernel) == "generic":
        pytest.skip(f"no kernel here takes experts of {scheme}; the generic one reads the bounds")
    with torch.inference_mode():
        play, y = accelerator().recorded(lambda: op.overload(x, ends, *operand(q), *act))
        for bounds in ([16, 32, 48, 64], [0, 5, 5, 40]):
            ends.copy_(torch.tensor(bounds, dtype=torch.int32))
            play()
            expected = op.generic(x, ends, *operand(q), *act)
            torch.testing.assert_close(y, expected, rtol=2**-5, atol=2**-5, msg=lambda text: f"{kernel}: {text}")
            assert not y[bounds[-1] :].any()


@pytest.fixture
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("scheme", ["int4", "int8", "int8-dyn", "fp8-row", "fp8-block", "mxfp8", "nvfp4", "nf4"])
def test_compiled_for_less_overhead(scheme: str) -> None:
    """One graph without breaks, and no CUDA graph skipped for a sync or a copy from the host."""
    from torch._dynamo.utils import counters

    made, counted = model(scheme), dict(counters["inductor"])
    compiled: Callable[..., Tensor] = torch.compile(made, mode="reduce-overhead", fullgraph=True)
    with torch.inference_mode():
        for seed in range(4):
            x = torch.randn(16, 512, generator=torch.Generator().manual_seed(seed)).to(DEVICE, BF16)
            y = compiled(x).clone()
            torch.testing.assert_close(y, made(x), rtol=2**-5, atol=2**-5)
    assert counters["inductor"]["cudagraph_skips"] == counted.get("cudagraph_skips", 0)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("name", ["int8", "int4-g32-asym", "fp8-wo"])
def test_a_cache_of_a_fixed_size_in_a_graph(name: str) -> None:
    """Each step writes a token and reads those before it, as a growing cache holds them."""
    draw, room, prompt = torch.Generator().manual_seed(0), 96, 40

    def tokens(heads: int, count: int) -> Tensor:
        return torch.randn(2, heads, count, 64, generator=draw).to(DEVICE, BF16)

    static, growing = StaticStore(name), KeyValueStore(name)
    keys, values = tokens(2, prompt), tokens(2, prompt)
    static.allocate(keys, values, room)
    static.write(keys, values, torch.arange(prompt, device=DEVICE))
    growing.append(keys, values)
    for part in static.parts:
        torch._dynamo.mark_static_address(part)

    def step(q: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
        static.write(keys, values, position)
        return static.attend(q, (torch.arange(room, device=DEVICE) <= position)[None, None, None])

    compiled: Callable[..., Tensor] = torch.compile(step, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for at in range(prompt, prompt + 6):  # warmed up, recorded, replayed
            q, keys, values = tokens(8, 1), tokens(2, 1), tokens(2, 1)
            growing.append(keys, values)
            y = compiled(q, keys, values, torch.tensor([at], device=DEVICE)).clone()
            assert float(sqnr(growing.attend(q).double(), y)) > 40
            assert torch.equal(static.dense_keys()[:, :, : at + 1], growing.dense_keys())


WATCHED = """
import torch, bitport as bp
from bitport.ops.product import operand
for scheme in ("int4", "int4-g32", "int3", "int8", "int8-dyn", "fp8-row", "fp8-block", "nf4", "mxfp8", "nvfp4"):
    for n, k in ((128, 256), (136, 384), (40, 128)):
        q = bp.quantize_tensor(torch.randn(n, k).bfloat16(), bp.preset(scheme)).to("cuda")
        for m in (1, 5, 17, 200):
            torch.nn.functional.linear(torch.randn(m, k, device="cuda", dtype=torch.bfloat16), q)
for scheme in ("int4", "int3", "nf4"):
    q = bp.quantize_tensor(torch.randn(41, 264).bfloat16(), bp.preset(scheme)).to("cuda")
    torch.nn.functional.embedding(torch.tensor([0, 7, 40], device="cuda"), q)
for scheme in ("int4", "int8-dyn", "mxfp8"):
    q = bp.quantize_tensor(torch.randn(3, 41, 288).bfloat16(), bp.preset(scheme)).to("cuda")
    x, act = torch.randn(29, 288, device="cuda", dtype=torch.bfloat16), [a for a in [bp.preset(scheme).act] if a]
    ends = torch.tensor([5, 5, 23], dtype=torch.int32, device="cuda")
    op = torch.ops.bitport.dyn_grouped_linear if act else torch.ops.bitport.grouped_linear
    op(x, ends, *operand(q), *act)
torch.cuda.synchronize()
"""
"""Sizes that fill no tile, so that accesses past an end are out of bounds."""


def test_watched_by_the_sanitizer() -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if DEVICE.type != "cuda" or torch.version.hip or sanitizer is None:
        pytest.skip("needs NVIDIA's compute-sanitizer, from the CUDA toolkit, on the PATH")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sanitizer, "--tool=memcheck", "--report-api-errors=no", "--error-exitcode=9", sys.executable, "-c", WATCHED],
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(root / "src")},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", [None, *GRADIENTS])
def test_training(name: str | None, compiled: bool) -> None:
    """A low-precision step: its gradients are close to those of a bfloat16 step, and converting the model does not
    change its output."""
    scheme = {None: "int4-g32", "int8": "int8-dyn", "int8-input": "int8-dyn", "fp8-row-input": "fp8-row"}.get(
        name, name
    )
    torch.manual_seed(0)
    floats = nn.Sequential(nn.Linear(256, 512), nn.SiLU(), nn.Linear(512, 128)).to(DEVICE, BF16)
    prepared = copy.deepcopy(floats)
    prepare_(prepared, preset(str(scheme)), gradients=name)
    forward = torch.compile(prepared, fullgraph=True) if compiled else prepared
    x, want = torch.randn(64, 256, device=DEVICE, dtype=BF16), torch.randn(64, 128, device=DEVICE, dtype=BF16)
    grads = []
    for model, run_it in ((floats, floats), (prepared, forward)):
        (run_it(x) - want).float().square().mean().backward()
        grads.append([param.grad.float().cpu() for param in model.parameters() if param.grad is not None])
    assert all(float(sqnr(a, b)) > 5 for a, b in zip(*grads, strict=True))
    with torch.no_grad():
        y = prepared(x)
        convert_(prepared)
        assert torch.equal(prepared(x), y)
