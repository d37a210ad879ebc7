"""How an absent device would hold a weight, which kernel it would run, and what that kernel calls: fake tensors on XPU,
CUDA or MPS. Run by test_devices.py, in a separate process: FAKE_DEVICE names the device, FAKE_DEVICE_GUARD a compiled
guard.cpp; empty if PyTorch was built for that device and has its own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import bitport as bp
from bitport.backends.cuda import capability
from bitport.errors import LayoutError
from bitport.ops import IMPLS, Decision, decide
from bitport.ops.product import operand

DEVICE = os.environ["FAKE_DEVICE"]
if guard := os.environ["FAKE_DEVICE_GUARD"]:
    torch.ops.load_library(guard)

N, K = 128, 256
ATEN = {
    ("xpu", "int4pack_mm"): "_weight_int4pack_mm_with_scales_and_zeros",
    ("xpu", "int8pack_mm"): "_weight_int8pack_mm",
    ("cuda", "int4pack_mm"): "_weight_int4pack_mm",
    ("mps", "int4pack_mm"): "_weight_int4pack_mm",
    ("mps", "int8pack_mm"): "_weight_int8pack_mm",
    **{(device, "int_mm"): "_int_mm" for device in ("xpu", "cuda")},
    **{(device, "scaled_mm"): "_scaled_mm" for device in ("xpu", "cuda")},
    ("cuda", "scaled_mm_blocks"): "_scaled_mm_v2",
}
INT4 = {"xpu": "plain_int32", "cuda": "tile_packed_8", "mps": "int4_pairs"}[DEVICE]
INT4_ROUNDED = "plain_int32" if DEVICE == "xpu" else "plain"
"""The layout where inputs are rounded: not one whose only kernels take unrounded inputs."""
NOT_INT8, NOT_FP8 = "the weight must be int8 without zero point", "the weight must be float8_e4m3"
NO_INT8 = {"int_mm": NOT_INT8} if DEVICE != "mps" else {}
ROUNDED = "rounded as fp8 or fp8-tensor or fp8-e5m2-tensor, not "


def units(scaled_mm: str) -> dict[str, str]:
    """Why neither unit takes the call, on devices that have both."""
    return {**NO_INT8, "scaled_mm": scaled_mm} if NO_INT8 else {}


EXPECTED: dict[str, tuple[str, str, dict[str, str]]] = {
    # scheme -> layout, kernel, part of the reason of each faster kernel
    "int4": (INT4, "int4pack_mm", {}),
    "int4-sym": (INT4, "int4pack_mm", {}),
    "int4-g32": (INT4, "int4pack_mm", {}),
    "int4-g64-sym": (INT4, "int4pack_mm", {}),
    "int4-g256": (INT4, "int4pack_mm", {}),
    "int8": {
        "cuda": (
            "signed_int8",
            "generic",
            {"int4pack_mm": "must be tile packed int4", "dense_mm": "in layout signed_int8"},
        ),
    }.get(DEVICE, ("signed_int8", "int8pack_mm", {})),
    "int8-asym": ("plain", "generic", {"int8pack_mm": "without zero point"} if DEVICE != "cuda" else {}),
    "mxfp8": ("plain", "generic", units(f"{ROUNDED}mxfp8")),
    "mxfp4": ("plain", "generic", units(NOT_FP8)),
    "nvfp4": ("plain", "generic", units(NOT_FP8)),
    "fp8-block": {
        "cuda": ("plain", "scaled_mm_blocks", {"scaled_mm": f"{ROUNDED}fp8-128"}),
    }.get(DEVICE, ("plain", "generic", units(f"{ROUNDED}fp8-128"))),
    **{scheme: (INT4_ROUNDED, "generic", units(NOT_FP8)) for scheme in ("int4-int8", "int4-fp8")},
    "int3": ("plain", "generic", {"int4pack_mm": "not int3"}),
    "nf4": ("plain", "generic", {"int4pack_mm": "not nf4"}),
    **{
        scheme: ("signed_int8" if "int8" in scheme else "plain", "generic" if DEVICE == "mps" else kernel, {})
        for scheme, kernel in {
            "fp8": "scaled_mm",
            "fp8-row": "scaled_mm",
            "int8-dyn": "int_mm",
            "int8-static": "int_mm",
        }.items()
    },
}


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorMode]:
    monkeypatch.setattr(capability, "of", lambda device: (9, 0))
    monkeypatch.setattr(capability, "toolkit", lambda: (12, 9))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


def layer(scheme: str, dtype: torch.dtype = torch.bfloat16, n: int = N, k: int = K, device: str = DEVICE) -> nn.Linear:
    """Quantized on the CPU, then moved. (Module.to cannot be used: PyTorch does not swap fake parameters.)"""
    linear = nn.Linear(k, n, dtype=dtype)
    static = {"act_scale": torch.ones(1, 1)} if bp.preset(scheme).static else {}
    q = bp.quantize_tensor(linear.weight, bp.preset(scheme), **static)
    linear.weight = nn.Parameter(q.to(device), requires_grad=False)
    linear.bias = nn.Parameter(linear.bias.to(device), requires_grad=False)
    return linear


def call(linear: nn.Linear, x: Tensor) -> tuple[str, tuple[object, ...]]:
    q = linear.weight
    if q.scheme.act:
        return "dyn_linear", (x, *operand(q), q.scheme.act, q.act_scale, linear.bias)
    return "linear", (x, *operand(q), linear.bias)


def rows(m: int = 5, dtype: torch.dtype = torch.bfloat16, k: int = K) -> Tensor:
    return torch.empty(m, k, dtype=dtype, device=DEVICE)


def decision(linear: nn.Linear, x: Tensor) -> Decision:
    op, args = call(linear, x)
    return decide(op, *args)


@pytest.mark.parametrize("scheme", EXPECTED)
def test_layout_and_kernel(scheme: str) -> None:
    layout, kernel, reasons = EXPECTED[scheme]
    linear = layer(scheme)
    decided = decision(linear, rows())
    assert linear.weight.device.type == DEVICE
    assert (linear.weight.bits_layout, decided.kernel) == (layout, kernel)
    refused = dict(decided.refused)
    for name, reason in reasons.items():
        assert reason in refused[name]
    y = linear(rows())
    assert (y.shape, y.dtype, y.device.type) == ((5, N), torch.bfloat16, DEVICE)


@pytest.mark.parametrize("m", [1, 5, 64])
@pytest.mark.parametrize("scheme", [scheme for scheme, (_, kernel, _) in EXPECTED.items() if kernel != "generic"])
def test_the_kernel_calls_the_op_of_its_device(scheme: str, m: int) -> None:
    linear, x = layer(scheme), rows(m)
    op, args = call(linear, x)
    kernel = EXPECTED[scheme][1]
    run = next(impl.run for impl in IMPLS[op, DEVICE] if impl.name == kernel)
    graph = make_fx(lambda x: run(x, *args[1:]), tracing_mode="real")(x).graph
    called = [node for node in graph.nodes if node.op == "call_function"]
    (mine,) = [node for node in called if ATEN[DEVICE, kernel] == node.target.overloadpacket.__name__]
    assert mine.meta["val"].device.type == DEVICE
    output = called[-1].meta["val"]
    assert (output.shape, output.dtype, output.is_contiguous()) == ((m, N), x.dtype, True)


@pytest.mark.parametrize("scheme", ["int4", "int8", "int8-dyn", "fp8-row", "mxfp4"])
@pytest.mark.parametrize("shape", [(K,), (2, 3, K), (0, K)], ids=["vector", "batch", "empty"])
def test_any_rank(scheme: str, shape: tuple[int, ...]) -> None:
    y = layer(scheme)(torch.empty(shape, dtype=torch.bfloat16, device=DEVICE))
    assert y.shape == (*shape[:-1], N)


@pytest.mark.parametrize("scheme", ["int4", "int8-dyn", "fp8"])
def test_traced_and_exported(scheme: str, fake: FakeTensorMode) -> None:
    linear = layer(scheme)
    op = f"bitport.{call(linear, rows())[0]}.default"
    graph = make_fx(linear, tracing_mode="real")(rows()).graph
    assert op in [str(node.target) for node in graph.nodes]
    exported = torch.export.export(linear, (rows(),), dynamic_shapes=({0: torch.export.Dim("m", min=2)},))
    assert op in [str(node.target) for node in exported.graph.nodes]


@pytest.mark.parametrize("scheme", ["int4", "int8", "fp8-row", "nf4"])
def test_back_on_the_cpu(scheme: str) -> None:
    q = layer(scheme).weight.to("cpu")
    here = layer(scheme, device="cpu").weight
    assert (q.bits_layout, q.device.type) == (here.bits_layout, "cpu")
    assert [None if p is None else (p.shape, p.dtype) for p in q.parts] == [
        None if p is None else (p.shape, p.dtype) for p in here.parts
    ]


REFUSED = [
    # kernel, scheme, dtype of x and scale, n, k, devices, part of the reason
    ("int4pack_mm", "int4", torch.float32, N, K, "xpu cuda", "bfloat16"),
    ("int4pack_mm", "int4", torch.float16, N, K, "cuda", "scales per group of 32 to 256), not int4 in layout plain"),
    ("int4pack_mm", "int4-g48", torch.bfloat16, N, 480, "xpu", "not per 1x48 block"),
    ("int4pack_mm", "int4-g64", torch.bfloat16, N, 96, "xpu", "that divides K=96"),
    ("int4pack_mm", "int4-g48", torch.bfloat16, N, 480, "cuda", "in layout plain"),
    ("int4pack_mm", "int4-fzero", torch.bfloat16, N, K, "xpu", "the zero point must be an integer"),
    ("int4pack_mm", "int4-b4x64", torch.bfloat16, N, K, "xpu", "not per 4x64 block"),
    ("int4pack_mm", "int4-g48", torch.bfloat16, N, 480, "mps", "in layout int4_pairs, not int4 in layout plain"),
    ("int4pack_mm", "int4", torch.bfloat16, 60, K, "mps", "in layout int4_pairs, not int4 in layout plain"),
    ("int8pack_mm", "int8", torch.bfloat16, 48, K, "mps", "multiples of 32, not 48 and 256"),
    ("int8pack_mm", "int8", torch.bfloat16, N, 240, "mps", "multiples of 32, not 128 and 240"),
    ("int8pack_mm", "int8-g64", torch.bfloat16, N, K, "xpu mps", "one per row, not per 1x64 block"),
    ("int_mm", "int8-dyn", torch.bfloat16, 60, K, "cuda", "multiples of 8, not 60 and 256"),
    ("int_mm", "int8-dyn", torch.bfloat16, N, 252, "cuda", "multiples of 8, not 128 and 252"),
    ("int_mm", "int8-dyn-g64", torch.bfloat16, N, K, "xpu cuda", "not per 1x64 block"),
    ("scaled_mm", "fp8-row", torch.bfloat16, 40, K, "xpu cuda", "multiples of 16, not 40 and 256"),
    ("scaled_mm", "fp8-row", torch.bfloat16, N, 72, "xpu cuda", "multiples of 16, not 128 and 72"),
    ("scaled_mm", "fp8-row", torch.float32, N, K, "xpu cuda", "not torch.float32"),
    ("scaled_mm", "fp8-row", torch.float16, N, K, "cuda", "not torch.float16"),
]


@pytest.mark.parametrize(
    ("kernel", "scheme", "dtype", "n", "k", "reason"),
    [
        pytest.param(kernel, scheme, dtype, n, k, reason, id=f"{kernel}-{scheme}-{str(dtype)[6:]}-{n}x{k}")
        for kernel, scheme, dtype, n, k, devices, reason in REFUSED
        if DEVICE in devices
    ],
)
def test_refused(kernel: str, scheme: str, dtype: torch.dtype, n: int, k: int, reason: str) -> None:
    linear, x = layer(scheme, dtype, n, k), rows(dtype=dtype, k=k)
    assert reason in dict(decision(linear, x).refused)[kernel]
    with pytest.raises(bp.errors.KernelError, match=f"kernel '{kernel}' was forced"), bp.use_kernel(kernel):
        linear(x)
    assert linear(x).shape == (5, n)


def test_dtype_of_x_unlike_that_of_the_scale() -> None:
    linear = layer("int4-sym")
    linear.bias = None
    decided = decision(linear, rows(dtype=torch.float16))
    assert decided.kernel == "generic"
    assert "torch.float16" in dict(decided.refused)["int4pack_mm"]


@pytest.mark.skipif(DEVICE != "cuda", reason="asks what a CUDA device can do")
@pytest.mark.parametrize(
    ("scheme", "kernel", "have", "reason"),
    [
        pytest.param("int4", "int4pack_mm", (7, 5), "it needs sm80; cuda:0 is sm75", id="int4-sm75"),
        pytest.param("int8-dyn", "int_mm", (7, 0), "it needs sm75; cuda:0 is sm70", id="int8-sm70"),
        pytest.param("fp8-row", "scaled_mm", (8, 0), "it needs sm89; cuda:0 is sm80", id="fp8-sm80"),
        pytest.param("fp8", "scaled_mm", (0, 0), "this one runs ROCm", id="fp8-rocm"),
    ],
)
def test_older_devices(
    scheme: str, kernel: str, have: tuple[int, int], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capability, "of", lambda device: have)
    decided = decision(layer(scheme), rows())
    assert decided.kernel == "generic"
    assert reason in dict(decided.refused)[kernel]


def test_quantized_without_data() -> None:
    model = nn.Sequential(nn.Linear(K, N, dtype=torch.bfloat16, device=DEVICE), nn.ReLU())
    report = bp.quantize_(model, "int4")
    assert (report.layers[0].scheme, report.layers[0].sqnr) == ("int4", None)
    assert (model[0].weight.bits_layout, model(rows()).shape) == (INT4, (5, N))


def test_weights_that_come_and_go_by_their_data() -> None:
    """As in group offloading of diffusers."""
    weight = layer("int4").weight
    for device in ("cpu", DEVICE):
        weight.data = weight.data.to(device)
        assert (weight.device.type, weight.qdata.device.type) == (device, device)
        assert isinstance(weight, nn.Parameter)
    assert weight.bits_layout == INT4


def test_explained() -> None:
    model = nn.Sequential(layer("int4"), layer("fp8-block", n=N, k=N))
    text = str(bp.explain(model, rows=(1, 1024)))
    assert INT4 in text
    assert "int4pack_mm" in text
    assert f"scaled_mm refused: the input must be {ROUNDED}fp8-128" in text or DEVICE == "mps"


def test_layouts_of_other_devices_are_refused_by_name() -> None:
    with pytest.raises(LayoutError, match="cannot hold this int3"):
        layer("int3").weight.to_layout(INT4)
