"""Which kernel runs for each scheme, number of rows and chip, as one table; and that no kernel makes the host
synchronize, so that all can be captured in a CUDA graph. Fake tensors only; run by test_devices.py, in a separate
process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import bitport as bp
from bitport.backends.aten import dense_mm
from bitport.backends.cuda import DENSE, capability
from bitport.ops import IMPLS, OPS, Impl, decide
from bitport.ops.product import operand

DEVICE = os.environ["FAKE_DEVICE"]
if guard := os.environ["FAKE_DEVICE_GUARD"]:
    torch.ops.load_library(guard)

N, K, EXPERTS = 128, 256, 4
COMPILED = ("few_rows", "few_rows_int8", "many_rows", "many_rows_int8")
"""Kernels in CUDA C++, tested by test_cuda_few_rows.py and test_cuda_many_rows.py."""
CAPABILITIES = {"sm75": (7, 5), "sm80": (8, 0), "sm89": (8, 9), "sm90": (9, 0), "sm100": (10, 0), "rocm": (0, 0)}

CHOSEN = """
scheme         rows  sm75      sm80         sm89         sm90               sm100         rocm      xpu          mps
int4           1     generic   int4pack_mm  int4pack_mm  int4pack_mm        int4pack_mm   generic   int4pack_mm  int4pack_mm
int4           64    generic   int4pack_mm  int4pack_mm  int4pack_mm        int4pack_mm   generic   int4pack_mm  int4pack_mm
int4           1024  generic   int4pack_mm  int4pack_mm  int4pack_mm        int4pack_mm   generic   int4pack_mm  dense_mm
int4           4096  dense_mm  dense_mm     dense_mm     dense_mm           dense_mm      dense_mm  int4pack_mm  dense_mm
int4-fzero     1     generic   int4pack_mm  int4pack_mm  int4pack_mm        int4pack_mm   generic   generic      int4pack_mm
int4-g48       1     generic   generic      generic      generic            generic       generic   generic      generic
int4-g48       1024  generic   generic      generic      generic            generic       generic   generic      generic
int3           64    generic   generic      generic      generic            generic       generic   generic      generic
int3           1024  generic   generic      generic      generic            generic       generic   generic      generic
int8           1     generic   generic      generic      generic            generic       generic   int8pack_mm  int8pack_mm
int8           1024  generic   generic      generic      generic            generic       generic   int8pack_mm  int8pack_mm
nf4            1     generic   generic      generic      generic            generic       generic   generic      generic
nf4            1024  generic   generic      generic      generic            generic       generic   generic      generic
int8-dyn       1     int_mm    int_mm       int_mm       int_mm             int_mm        generic   int_mm       generic
int8-dyn       1024  int_mm    int_mm       int_mm       int_mm             int_mm        generic   int_mm       generic
int4-int8      64    generic   generic      generic      generic            generic       generic   generic      generic
fp8            1     generic   generic      scaled_mm    scaled_mm          scaled_mm     generic   scaled_mm    generic
fp8-row        1024  generic   generic      scaled_mm    scaled_mm          scaled_mm     generic   scaled_mm    generic
fp8-block      1     generic   generic      generic      scaled_mm_blocks   generic       generic   generic      generic
fp8-block      1024  generic   generic      generic      scaled_mm_blocks   generic       generic   generic      generic
mxfp8          1     generic   generic      generic      generic            scaled_mm_mx  generic   generic      generic
mxfp8          1024  generic   generic      generic      generic            scaled_mm_mx  generic   generic      generic
nvfp4          64    generic   generic      generic      generic            scaled_mm_mx  generic   generic      generic
mxfp4          64    generic   generic      generic      generic            generic       generic   generic      generic
experts:int4   64    generic   generic      generic      grouped_mm         grouped_mm    generic   generic      generic
experts:mxfp4-wo  64 generic   generic      generic      grouped_mm         grouped_mm    generic   generic      generic
experts:fp8-row  64  generic   generic      generic      scaled_grouped_mm  generic       generic   generic      generic
experts:int8-dyn  64 generic   generic      generic      generic            generic       generic   generic      generic
"""  # noqa: E501


def chosen(table: str) -> Iterator[Any]:
    """The entries of a table that are for this process's device; "-" marks another build of PyTorch."""
    header, *lines = (line.split() for line in table.strip().splitlines())
    for scheme, rows, *kernels in lines:
        for chip, kernel in zip(header[2:], kernels, strict=True):
            if (chip if chip in ("xpu", "mps") else "cuda") == DEVICE and kernel != "-":
                yield pytest.param(scheme, int(rows), chip, kernel, id=f"{scheme}-{rows}-{chip}")


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorMode]:
    be(monkeypatch, "sm90")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


def be(monkeypatch: pytest.MonkeyPatch, chip: str) -> None:
    monkeypatch.setattr(capability, "of", lambda device: CAPABILITIES.get(chip))
    monkeypatch.setattr(capability, "toolkit", lambda: (12, 9))


def arguments(
    name: str, rows: int, dtype: torch.dtype = torch.bfloat16, n: int = N, layout: str | None = None
) -> tuple[str, tuple[Any, ...]]:
    """(op, its arguments) for a scheme, with the weight in the layout that the device prefers or in ``layout``; a name
    that begins with "experts:" gives experts."""
    experts, _, scheme_name = name.rpartition(":")
    scheme = bp.preset(scheme_name)
    k = 480 if "g48" in name else K
    value = torch.empty(n, k, dtype=dtype)
    q = bp.quantize_tensor(value.expand(EXPERTS, n, k) if experts else value, scheme).to(DEVICE)
    q = q if layout is None else q.to_layout(layout)
    x = torch.empty(rows, k, dtype=dtype, device=DEVICE)
    act = [scheme.act] if scheme.act else []
    if experts:
        ends = torch.empty(EXPERTS, dtype=torch.int32, device=DEVICE)
        return "dyn_grouped_linear" if act else "grouped_linear", (x, ends, *operand(q), *act)
    bias = torch.empty(n, dtype=dtype, device=DEVICE)
    return "dyn_linear" if act else "linear", (x, *operand(q), *([*act, None] if act else []), bias)


@pytest.mark.parametrize(("scheme", "rows", "chip", "kernel"), chosen(CHOSEN))
def test_chosen(scheme: str, rows: int, chip: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    be(monkeypatch, chip)
    check_chosen(scheme, rows, kernel)


def check_chosen(scheme: str, rows: int, kernel: str) -> None:
    op, args = arguments(scheme, rows)
    decided = decide(op, *args)
    assert decided.kernel == kernel, decided
    y = OPS[op].overload(*args)
    assert (y.shape, y.dtype, y.device.type) == ((rows, N), torch.bfloat16, DEVICE)


@pytest.mark.parametrize("chip", ["sm90", "sm100"])
@pytest.mark.parametrize("scheme", ["int4", "int8", "int8-dyn", "fp8-row", "fp8-block", "mxfp8", "experts:int4"])
def test_no_kernel_takes_a_weight_without_rows(scheme: str, chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be what a sharded weight leaves to one device. Kernels cannot be launched for nothing."""
    be(monkeypatch, chip)
    op, args = arguments(scheme, 64, n=0)
    assert decide(op, *args).kernel == "generic"
    assert OPS[op].overload(*args).shape == (64, 0)


WAIT = {"_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "_unique2", "equal", "is_nonzero"}
"""Ops that copy data to the host, or whose output size depends on data."""


def waits(run: Any, *args: Any) -> list[str]:
    """What in ``run(*args)`` synchronizes or cannot be captured: those ops, and tensors on other devices."""

    def of_tensors(*tensors: Tensor) -> Any:
        left = list(tensors)
        return run(*(left.pop(0) if isinstance(arg, Tensor) else arg for arg in args))

    graph = make_fx(of_tensors, tracing_mode="real")(*(arg for arg in args if isinstance(arg, Tensor))).graph
    found = [str(node.target) for node in graph.nodes if node.op == "get_attr"]
    for node in graph.nodes:
        if node.op == "call_function":
            values = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else [node.meta["val"]]
            elsewhere = [each for each in values if isinstance(each, Tensor) and each.device.type != DEVICE]
            if node.target.overloadpacket.__name__ in WAIT or elsewhere:
                found.append(str(node.target))
    return found


TAKEN = {
    "linear": ("int4", "int4-sym", "int4-fzero", "int8", "int3", "nf4", "mxfp4-wo", "fp8-wo", "nvfp4-wo"),
    "dyn_linear": ("int8-dyn", "fp8", "fp8-row", "fp8-block", "mxfp8", "nvfp4"),
    "grouped_linear": ("experts:int4", "experts:nf4", "experts:mxfp4-wo"),
    "dyn_grouped_linear": ("experts:fp8-row",),
}


def candidates() -> list[Any]:
    return [
        pytest.param(impl, scheme, rows, id=f"{impl.name}-{scheme}-{rows}")
        for op, schemes in TAKEN.items()
        for impl in IMPLS.get((op, DEVICE), [])
        for scheme in schemes
        for rows in (1, 7, 4096)
    ]


@pytest.mark.parametrize(("impl", "scheme", "rows"), candidates())
def test_nobody_waits(impl: Impl, scheme: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    be(monkeypatch, "sm100" if impl.name == "scaled_mm_mx" else "sm90")
    _, args = arguments(scheme, rows)
    if impl.supports(*args) is None:
        assert waits(impl.run, *args) == []


@pytest.mark.skipif(DEVICE == "mps", reason="PyTorch captures no graphs there")
@pytest.mark.parametrize("scheme", bp.PRESETS)
def test_nobody_waits_for_the_generic_kernels(scheme: str) -> None:
    """They run where no other kernel takes a call, and can be captured too. (A static scale is a constant.)"""
    op, args = arguments(scheme, 7)
    assert waits(OPS[op].generic, *args) == []
    weight = args[1:11]
    assert waits(OPS["dequantize"].generic, *weight, torch.bfloat16) == []
    ids = torch.empty(3, dtype=torch.int64, device=DEVICE)
    assert waits(OPS["embedding"].generic, ids, *weight, torch.bfloat16) == []


@pytest.mark.parametrize("op", TAKEN)
def test_each_candidate_takes_something(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above cannot pass by refusals alone. CUDA C++ is left out, as it refuses without a compiler."""
    for impl in IMPLS.get((op, DEVICE), []):
        if impl.name in COMPILED:
            continue
        be(monkeypatch, "sm100" if impl.name == "scaled_mm_mx" else "sm90")
        assert any(impl.supports(*arguments(scheme, rows)[1]) is None for scheme in TAKEN[op] for rows in (1, 4096))


def test_a_wait_is_seen() -> None:
    def reads_back(x: Tensor) -> Tensor:
        return x + torch.ones(4).to(DEVICE)

    assert waits(reads_back, torch.empty(4, device=DEVICE))
    with pytest.raises(DataDependentOutputException):
        waits(lambda x: x * x.sum().item(), torch.empty(4, device=DEVICE))


@pytest.mark.skipif(DEVICE != "cuda", reason="the experts' kernels are for CUDA")
def test_the_generic_experts_do_wait() -> None:
    """The reason for separate expert kernels: the generic one reads the bounds."""
    op, args = arguments("experts:int4", 64)
    with pytest.raises(DataDependentOutputException):
        waits(OPS[op].generic, *args)


REFUSED = [
    # kernel, scheme, rows, dtype of x, n, chip, PyTorch's CUDA version, part of the reason
    ("dense_mm", "int4", 2191, torch.bfloat16, N, "sm90", (12, 9), "int4 dense pays from 2192 rows on; x has 2191"),
    ("dense_mm", "int8", 999, torch.bfloat16, N, "sm90", (12, 9), "tile_packed_8; the weight is in layout signed_int8"),
    ("scaled_mm_blocks", "fp8-block", 4, torch.bfloat16, 160, "sm90", (12, 9), "multiples of 128, not 160 and 256"),
    ("scaled_mm_blocks", "fp8-block", 4, torch.float16, N, "sm90", (12, 9), "x must be bfloat16, not torch.float16"),
    ("scaled_mm_blocks", "fp8-block", 4, torch.bfloat16, N, "sm100", (12, 9), "runs on sm9x alone; cuda:0 is sm100"),
    ("scaled_mm_blocks", "fp8-block", 4, torch.bfloat16, N, "sm90", (12, 6), "CUDA 12.9 or newer, not 12.6"),
    ("scaled_mm_blocks", "fp8-row", 4, torch.bfloat16, N, "sm90", (12, 9), "rounded as fp8-128, not fp8"),
    ("scaled_mm_mx", "mxfp8", 4, torch.bfloat16, N, "sm90", (12, 9), "it needs sm100; cuda:0 is sm90"),
    ("scaled_mm_mx", "mxfp8", 4, torch.bfloat16, N, "rocm", (12, 9), "this one runs ROCm"),
    ("scaled_mm_mx", "mxfp8", 4, torch.bfloat16, 120, "sm100", (12, 9), "multiple of 16 and K of 32, not 120 and 256"),
    ("scaled_mm_mx", "mxfp6", 4, torch.bfloat16, N, "sm100", (12, 9), "must be mxfp8 as well, not float6_e2m3"),
    ("scaled_mm_mx", "mxfp4", 4, torch.bfloat16, N, "sm100", (12, 9), "rounded as mxfp8 or nvfp4, not mxfp4"),
    ("grouped_mm", "experts:int4", 4, torch.bfloat16, N, "sm89", (12, 9), "runs on sm9x or sm10x alone"),
    ("grouped_mm", "experts:int4", 4, torch.bfloat16, 60, "sm90", (12, 9), "multiples of 8 (16 bytes of bfloat16)"),
    ("grouped_mm", "experts:int4", 0, torch.bfloat16, N, "sm90", (12, 9), "x has no rows"),
    ("grouped_mm", "experts:int4", 4, torch.float32, N, "sm90", (12, 9), "x must be bfloat16, not torch.float32"),
    ("scaled_grouped_mm", "experts:fp8-row", 4, torch.bfloat16, 72, "sm90", (12, 9), "multiples of 16, not 72 and 256"),
    ("scaled_grouped_mm", "experts:mxfp8", 4, torch.bfloat16, N, "sm90", (12, 9), "rounded as fp8, not mxfp8"),
]


@pytest.mark.skipif(DEVICE != "cuda", reason="asks what a CUDA device can do")
@pytest.mark.parametrize(
    ("kernel", "scheme", "rows", "dtype", "n", "chip", "toolkit", "reason"),
    [
        pytest.param(*case, id=f"{case[0]}-{case[1]}-{case[2]}x{case[4]}-{str(case[3])[6:]}-{case[5]}")
        for case in REFUSED
    ],
)
def test_refused(
    kernel: str,
    scheme: str,
    rows: int,
    dtype: torch.dtype,
    n: int,
    chip: str,
    toolkit: tuple[int, int],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    be(monkeypatch, chip)
    monkeypatch.setattr(capability, "toolkit", lambda: toolkit)
    op, args = arguments(scheme, rows, dtype, n)
    (impl,) = (impl for impl in IMPLS[op, DEVICE] if impl.name == kernel)
    assert reason in str(impl.supports(*args))


@pytest.mark.skipif(DEVICE != "cuda", reason="tinygemm's own contract")
def test_the_op_with_tinygemms_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=DEVICE)

    args = make(3, K), make(N // 8, K // 128, 32, 4, dtype=torch.int32), 64, make(K // 64, N, 2)
    assert decide("int4pack_mm", *args).kernel == "aten"
    assert OPS["int4pack_mm"].overload(*args).shape == (3, N)
    be(monkeypatch, "sm75")
    assert decide("int4pack_mm", *args).kernel == "generic"


def test_the_break_even_is_where_the_bytes_are_equal() -> None:
    """Codes read once per 16 rows, against codes read once plus what dequantizing them moves."""
    rows = dense_mm.least_rows(DENSE, "int4")
    assert rows / DENSE.rows_per_pass * 0.5 == 0.5 + DENSE.moved
