"""Numerics of the kernels that call PyTorch's own ops: on the CPU where these exist there, otherwise emulated from
their contract."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import bitport as bp
from bitport import layouts
from bitport.backends.aten import int8pack_mm, int_mm, rows, scaled_mm, scaled_mm_mx
from bitport.backends.cpu import int8pack_mm as cpu_int8pack_mm
from bitport.backends.cpu import int_mm as cpu_int_mm
from bitport.backends.cuda import capability
from bitport.backends.cuda import int4pack_mm as cuda_int4pack_mm
from bitport.backends.xpu import int4pack_mm as xpu_int4pack_mm
from bitport.ops import OPS, Sample, Weight
from bitport.ops.product import operand
from bitport.ops.samples import apart, product_budget
from tests.backends.products import CPU, products, shortfall

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HALVES = (BF16, FP16)
FLOATS = (*HALVES, FP32)


def xpu_int4_emulator(x: Tensor, data: Tensor, group: int, scale: Tensor, zero: Tensor) -> Tensor:
    """The contract of aten::_weight_int4pack_mm_with_scales_and_zeros, its checks included."""
    n, k = data.shape[0], data.shape[1] * 8
    assert x.dim() == 2
    assert x.is_contiguous()
    assert x.dtype in HALVES
    assert x.shape[1] == k
    assert data.dtype == torch.int32
    assert data.is_contiguous()
    assert group % 32 == 0
    assert k % group == 0
    assert scale.shape == zero.shape == (k // group, n)
    assert scale.is_contiguous()
    assert zero.is_contiguous()
    assert scale.dtype == x.dtype
    assert zero.dtype == torch.int8
    codes = torch.stack([data >> 4 * nibble & 0xF for nibble in range(8)], -1).reshape(n, k)
    steps = codes - zero.t().repeat_interleave(group, 1)
    return x @ (steps * scale.t().float().repeat_interleave(group, 1)).to(x.dtype).t()


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate what no CPU has: the int4 products of XPU and CUDA."""
    monkeypatch.setattr(torch.ops.aten, "_weight_int4pack_mm_with_scales_and_zeros", xpu_int4_emulator)
    monkeypatch.setattr(torch, "_weight_int4pack_mm", OPS["int4pack_mm"].generic)
    monkeypatch.setattr(capability, "of", lambda device: (9, 0))


def by_rows() -> bool:
    """Whether PyTorch's CPU op multiplies float8 with scales per row, as it stands in for devices; 2.11 does not."""
    a, scale = torch.zeros(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(a, a.t(), scale, scale.t(), out_dtype=BF16)
    except RuntimeError:
        return False
    return True


needs_unsigned = pytest.mark.skipif(not cpu_int_mm.takes_unsigned(), reason="this PyTorch multiplies no unsigned bytes")
needs_vnni = pytest.mark.skipif(not cpu_int_mm.VNNI, reason="this processor has no VNNI")
needs_rows = pytest.mark.skipif(not by_rows(), reason="this PyTorch multiplies no float8 by rows on the CPU")


def needs(kernel: str, scheme: str = "") -> tuple[pytest.MarkDecorator, ...]:
    """What a test of ``kernel`` requires of the CPU's ops."""
    return (needs_unsigned, needs_vnni) if kernel == "cpu-int_mm" else (needs_rows,) if scheme == "fp8-row" else ()


Kernel = tuple[Callable[..., Tensor], Callable[..., "str | None"]]
KERNELS: dict[str, tuple[Kernel, str, tuple[str, ...], tuple[torch.dtype, ...]]] = {
    "xpu-int4pack": (
        (xpu_int4pack_mm.run, xpu_int4pack_mm.refuses),
        "plain_int32",
        ("int4", "int4-sym", "int4-g32", "int4-g64-sym", "int4-g256", "int4-channel"),
        HALVES,
    ),
    "xpu-int8pack": ((int8pack_mm.run, partial(int8pack_mm.refuses, "signed_int8")), "signed_int8", ("int8",), FLOATS),
    "xpu-int_mm": (
        (partial(int_mm.run, 0), partial(int_mm.refuses, "signed_int8")),
        "signed_int8",
        ("int8-dyn", "int8-static", "int8-dyn-tensor"),
        FLOATS,
    ),
    "xpu-scaled_mm": ((scaled_mm.run, partial(scaled_mm.refuses, HALVES)), "plain", ("fp8", "fp8-row"), HALVES),
    "cuda-int4pack": (
        (cuda_int4pack_mm.run, cuda_int4pack_mm.refuses),
        "tile_packed_8",
        ("int4", "int4-sym", "int4-g32-fzero", "int4-g64"),
        (BF16,),
    ),
    "cuda-int_mm": (
        (partial(int_mm.run, 17), partial(int_mm.refuses, "signed_int8")),
        "signed_int8",
        ("int8-dyn", "int8-static"),
        FLOATS,
    ),
    "cpu-int_mm": (
        (cpu_int_mm.run, cpu_int_mm.refuses),
        "plain",
        ("int8-dyn", "int8-static", "int8-dyn-tensor"),
        FLOATS,
    ),
    "cpu-int8pack": ((cpu_int8pack_mm.run, cpu_int8pack_mm.refuses), "plain", ("int8",), (BF16,)),
}
CASES = [
    pytest.param(*(kernel, scheme, dtype, layout), id=f"{name}-{scheme}-{str(dtype)[6:]}", marks=needs(name, scheme))
    for name, (kernel, layout, schemes, dtypes) in KERNELS.items()
    for scheme in schemes
    for dtype in dtypes
]


def further_roundings(layout: str, zero: Tensor | None, bias: Tensor | None) -> int:
    """Roundings beyond those of the weight and the result, which the budget includes: int4 products are rounded before
    the bias is added, and the tile-packed layout rounds the shift of a zero point."""
    if layout == "plain_int32":
        return int(bias is not None)
    return int(bias is not None) + int(zero is not None) if layout.startswith("tile_packed") else 0


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("kernel", "scheme", "dtype", "layout"), CASES)
def test_within_budget(kernel: Kernel, scheme: str, dtype: torch.dtype, layout: str, with_bias: bool) -> None:
    run, refuses = kernel
    refused, missed = {}, {}
    for sample in products(scheme, dtype, layout, n=48, k=256, with_bias=with_bias):
        allowed = 10 * math.log10(1 + further_roundings(layout, sample.args[3], sample.args[-1]) / 2)
        if reason := refuses(*sample.args):
            refused[sample.name] = reason
        elif (gap := shortfall(sample, run(*sample.args))) > allowed:
            missed[sample.name] = gap
    assert missed == {}
    assert refused in ({}, {f"{scheme}-empty": "x has no rows"})


@pytest.mark.parametrize("dtype", FLOATS, ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(name)) for name in KERNELS if name.endswith("int_mm")])
def test_samples_that_int_mm_takes(name: str, dtype: torch.dtype) -> None:
    (run, refuses), layout, _, _ = KERNELS[name]
    taken: list[str] = []
    for sample in OPS["dyn_linear"].samples(CPU, dtype):
        packed = repacked(sample, layout)
        if packed is not None and refuses(*packed.args) is None:
            assert shortfall(packed, run(*packed.args)) <= 0, sample.name
            taken.append(sample.name)
    assert len(taken) == 25  # twelve inputs with rows of int8-dyn and int8-static, and one with a NaN of int8-dyn


def repacked(sample: Sample, layout: str) -> Sample | None:
    weight = Weight(*sample.args[1:11])
    if layouts.layout(layout).refuses(weight.matrix, weight.parts):
        return None
    args = (sample.args[0], *weight.to_layout(layout), *sample.args[11:])
    return Sample(sample.name, args, sample.expected, sample.budget)


@pytest.mark.parametrize("m", [1, 16, 17, 40])
@pytest.mark.parametrize("name", [pytest.param("cpu-int_mm", marks=needs("cpu-int_mm")), "cuda-int_mm", "xpu-int_mm"])
def test_sums_are_exact(name: str, m: int) -> None:
    """With power-of-two scales nothing is rounded: the largest possible sums of 1056 products."""
    (run, refuses), layout, _, _ = KERNELS[name]
    n, k = 24, 1056
    weight = torch.randint(0, 2, (n, k)) * 255  # -128 and 127
    weight[0], weight[1] = 0, 255
    x = torch.where(torch.rand(m, k) < 0.5, -127.0, 127.0)
    x[0] = -127.0
    data = weight.to(torch.uint8) if layout == "plain" else (weight - 128).to(torch.int8)
    one = torch.ones(1, 1)
    args: tuple[Any, ...] = (
        *(x, data, torch.full((n, 1), 0.5), None, None, "int8", n, k, 1, k, layout),
        *("int8-tensor", one, None),
    )
    assert refuses(*args) is None
    assert torch.equal(run(*args).double(), x.double() @ (weight - 128).double().t() / 2)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_layer_of_few_inputs(k: int) -> None:
    """aten::_int_mm with one column reads past its end, so the kernel falls back to the generic one."""
    for sample in products("int8-dyn", FP32, "plain", n=48, k=k, m=5):
        assert shortfall(sample, OPS["dyn_linear"].overload(*sample.args)) <= 0


@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("n", [1, 7, 17])
@pytest.mark.usefixtures("emulated")
def test_rows_that_fill_no_tile(n: int, with_bias: bool) -> None:
    """N is padded in the tile-packed layout, and the result cut back, without the gaps that this leaves."""
    for sample in products("int4", BF16, "tile_packed_8", n=n, k=128, with_bias=with_bias):
        if sample.name != "int4-empty":
            assert shortfall(sample, cuda_int4pack_mm.run(*sample.args)) <= 10 * math.log10(2), sample.name


@pytest.mark.parametrize("dtype", FLOATS, ids=["bf16", "fp16", "fp32"])
def test_rows_start_where_vectors_do(dtype: torch.dtype) -> None:
    """A slice of a larger buffer may start anywhere; aligned ones are not copied."""
    buffer = torch.randn(65, dtype=torch.float32).to(dtype)
    for start in (0, 1, 8):
        x = buffer[start : start + 48].view(2, 3, 8)
        got = rows(x)
        assert torch.equal(got, x.view(6, 8))
        assert got.data_ptr() % 16 == 0
        assert (got.data_ptr() == x.data_ptr()) == (start != 1)


def test_rows_of_memory_that_is_not_aligned() -> None:
    """It begins at its storage, which begins anywhere."""
    x = torch.frombuffer(bytearray(range(82)), dtype=BF16, offset=2, count=40)[:32].view(4, 8)
    x = x if x.data_ptr() % 16 else torch.frombuffer(bytearray(range(82)), dtype=BF16, offset=4, count=32).view(4, 8)
    assert x.storage_offset() == 0
    assert x.data_ptr() % 16 != 0
    assert rows(x).data_ptr() % 16 == 0
    assert torch.equal(rows(x).view(torch.int16), x.view(torch.int16))


@pytest.mark.parametrize(
    ("scheme", "run", "op", "cut"),
    [
        ("int8-dyn", partial(int_mm.run, 17), "torch._int_mm", slice(8, 40)),
        ("fp8-row", scaled_mm.run, "torch._scaled_mm", slice(8, 40)),
        ("nvfp4", scaled_mm_mx.run, "torch.nn.functional.scaled_mm", slice(16, 48)),
    ],
)
def test_columns_of_a_weight_start_where_vectors_do(
    scheme: str, run: Any, op: str, cut: slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = bp.quantize_tensor(torch.randn(64, 64).to(BF16), scheme).to_layout("plain")[:, cut]
    given = []

    def library(a: Tensor, b: Tensor, *rest: Any, **options: Any) -> Tensor:
        given.extend([a, b])
        return torch.zeros(a.shape[0], b.shape[1], dtype=torch.int32 if op == "torch._int_mm" else BF16)

    monkeypatch.setattr(op, library)
    act = q.scheme.act
    run(torch.randn(3, 32).to(BF16), *operand(q), act, None, None)
    assert [part.data_ptr() % 16 for part in given] == [0, 0]
    assert given[1].t().is_contiguous()
    assert torch.equal(given[1].t().contiguous().view(torch.uint8), operand(q)[0].contiguous().view(torch.uint8))


@needs_rows
def test_a_bias_with_gaps_is_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA the library gets only the pointer of a bias, not its stride."""
    product = torch._scaled_mm

    def emulated(*args: Any, bias: Tensor, **rest: Any) -> Tensor:
        return product(*args, bias=bias.as_strided(bias.shape, (1,)), **rest)

    monkeypatch.setattr(torch, "_scaled_mm", emulated)
    (sample,) = products("fp8-row", BF16, "plain", n=48, k=256, m=5)
    *rest, bias = sample.args
    apart = torch.stack([bias, bias + 9], -1)[:, 0]
    assert shortfall(sample, scaled_mm.run(*rest, apart)) <= 0


CUT = {"cpu-int8pack": "int8", "cpu-int_mm": "int8-dyn", "xpu-scaled_mm": "fp8-row"}


@pytest.mark.parametrize(("name", "scheme"), [pytest.param(*each, marks=needs(*each)) for each in CUT.items()])
def test_columns_that_were_cut_out(name: str, scheme: str) -> None:
    """As one group of several: its scales, one a row, lie apart as far as those of all groups do."""
    (run, refuses), layout, _, _ = KERNELS[name]
    for sample in products(scheme, BF16, layout, n=48, k=256, m=5):
        x, *weight, rest = sample.args[0], *sample.args[1:11], sample.args[11:]
        args = (x, *apart(Weight(*weight)), *rest)
        assert args[2].stride() == (2, 1)
        assert refuses(*args) is None
        assert shortfall(sample, run(*args)) <= 0


REFUSALS: dict[str, tuple[str, str, torch.dtype, dict[int, Any], str]] = {
    # kernel, scheme, dtype of x, changed arguments (by position) -> part of the reason
    "xpu-int4-fp32": ("xpu-int4pack", "int4-g32", FP32, {}, "x must be bfloat16 or float16, not torch.float32"),
    "xpu-int4-group-48": ("xpu-int4pack", "int4-g32", BF16, {9: 48}, "group of 32, 64, .. that divides K=256"),
    "xpu-int4-group-96": ("xpu-int4pack", "int4-g32", BF16, {9: 96}, "not per 1x96 block"),
    "xpu-int4-two-rows": ("xpu-int4pack", "int4-g32", BF16, {8: 2}, "not per 2x32 block"),
    "xpu-int4-float-zero": ("xpu-int4pack", "int4-g32-fzero", BF16, {}, "zero point must be an integer"),
    "xpu-int4-scale-dtype": ("xpu-int4pack", "int4-g32", BF16, {2: torch.ones(8, 48)}, "one dtype, not torch.float32"),
    "xpu-int4-plain": ("xpu-int4pack", "int4-g32", BF16, {10: "plain"}, "must be in layout plain_int32, not plain"),
    "xpu-int8-scale-dtype": ("xpu-int8pack", "int8", BF16, {2: torch.ones(48, 1)}, "of one dtype, not torch.float32"),
    "xpu-int8-plain": ("xpu-int8pack", "int8", BF16, {10: "plain"}, "must be in layout signed_int8, not plain"),
    "xpu-int8-zero": ("xpu-int8pack", "int8", BF16, {3: torch.zeros(48, 1, dtype=torch.uint8)}, "without zero point"),
    "xpu-int_mm-act": ("xpu-int_mm", "int8-dyn", BF16, {11: "int8-asym"}, "as int8 or int8-tensor, not int8-asym"),
    "xpu-int_mm-groups": ("xpu-int_mm", "int8-dyn", BF16, {9: 128}, "one per row or one for all, not per 1x128 block"),
    "xpu-int_mm-long": (
        "xpu-int_mm",
        "int8-dyn",
        BF16,
        {7: 70000, 9: 70000},
        "with more the sums overflow",
    ),
    "cpu-int_mm-column": (
        "cpu-int_mm",
        "int8-dyn",
        FP32,
        {7: 1, 9: 1},
        "K must be from 2 to 65793, not 1: with one column",
    ),
    "xpu-scaled_mm-fp32": ("xpu-scaled_mm", "fp8-row", FP32, {}, "not torch.float32"),
    "xpu-scaled_mm-odd-n": ("xpu-scaled_mm", "fp8-row", BF16, {6: 50}, "multiples of 16, not 50 and 256"),
    "xpu-scaled_mm-mixed": ("xpu-scaled_mm", "fp8", BF16, {11: "fp8"}, "fp8 needs one weight scale per row"),
    "xpu-scaled_mm-act": ("xpu-scaled_mm", "fp8-row", BF16, {11: "mxfp8"}, "or fp8-e5m2-tensor, not mxfp8"),
    "xpu-scaled_mm-int8": ("xpu-scaled_mm", "fp8-row", BF16, {5: "int8"}, "must be float8_e4m3, not int8"),
    "cuda-int4-fp16": ("cuda-int4pack", "int4-g64", FP16, {}, "x must be bfloat16, not torch.float16"),
    "cuda-int4-plain": ("cuda-int4pack", "int4-g64", BF16, {10: "plain"}, "not int4 in layout plain"),
    "cpu-int8-many-rows": ("cpu-int8pack", "int8", BF16, {0: torch.ones(33, 256, dtype=BF16)}, "to 32 rows; x has 33"),
    "cpu-int8-fp32": ("cpu-int8pack", "int8", FP32, {}, "x must be bfloat16, not torch.float32"),
    "cpu-int8-ragged": ("cpu-int8pack", "int8", BF16, {7: 250}, "K must be a multiple of 32, not 250"),
}


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str) -> None:
    name, scheme, dtype, changes, reason = REFUSALS[case]
    (_, refuses), layout, _, _ = KERNELS[name]
    made = BF16 if layout.startswith("tile") else dtype
    sample = next(iter(products(scheme, made, layout, n=48, k=256, m=5)))
    args = [changes.get(at, arg) for at, arg in enumerate(sample.args)]
    if 0 not in changes:
        args[0] = args[0].to(dtype)
    assert reason in str(refuses(*args))


def test_a_pytorch_without_unsigned_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as 2.11 on the CPU; the generic kernel runs instead."""
    (sample,) = products("int8-dyn", BF16, "plain", n=48, k=256, m=5)

    def signed_only(a: Tensor, b: Tensor) -> Tensor:
        raise RuntimeError("int_mm_out_cpu: Expected self dtype to be of type int8 but got unsigned char")

    monkeypatch.setattr(torch, "_int_mm", signed_only)
    monkeypatch.setattr(cpu_int_mm, "takes_unsigned", cpu_int_mm.takes_unsigned.__wrapped__)
    monkeypatch.setattr(cpu_int_mm, "VNNI", True)
    assert "takes no unsigned bytes" in str(cpu_int_mm.refuses(*sample.args))


def test_processors_without_vnni_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = next(iter(products("int8-dyn", BF16, "plain", n=48, k=256, m=5)))
    monkeypatch.setattr(cpu_int_mm, "VNNI", False)
    assert cpu_int_mm.refuses(*sample.args) == "this processor has no VNNI"


@needs_unsigned
def test_budgets_can_fail() -> None:
    """A weight with one code off by one exceeds the budget."""
    sample = next(iter(products("int8-dyn", FP32, "plain", n=48, k=256, m=5)))
    args = list(sample.args)
    args[1] = args[1].clone()
    args[1][0, 0] ^= 1
    assert sample.budget == product_budget(FP32, 256, 5 * 48)
    assert shortfall(sample, cpu_int_mm.run(*args)) > 30
