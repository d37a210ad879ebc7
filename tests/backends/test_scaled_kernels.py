"""Numerics of the kernels for PyTorch ops that no CPU has: emulated from their contracts, including the checks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bitport as bp
from bitport.backends import cuda, mps
from bitport.backends.aten import (
    dense_mm,
    grouped_mm,
    int8pack_mm,
    scaled_grouped_mm,
    scaled_mm_blocks,
    scaled_mm_mx,
)
from bitport.backends.mps import int4pack_mm as mps_int4pack_mm
from bitport.numerics import NUMBER_TYPES
from bitport.ops import OPS, Weight
from bitport.ops.product import operand
from bitport.ops.reference import code_value
from bitport.ops.select import CHOOSERS
from bitport.ops.table import bits
from tests.backends.products import CPU, products, shortfall

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Kinds = ScalingType | list[ScalingType]


def values(codes: Tensor) -> Tensor:
    """float8 codes, or pairs of float4 codes along the last axis, in float64."""
    if codes.dtype != torch.float4_e2m1fn_x2:
        return codes.double()
    raw = codes.view(torch.uint8)
    table = torch.tensor([code_value(NUMBER_TYPES["float4_e2m1"], code) for code in range(16)], dtype=torch.float64)
    return torch.stack([table[(raw & 15).int()], table[(raw >> 4).int()]], -1).flatten(-2)


def unswizzled(scale: Tensor, rows: int, blocks: int) -> Tensor:
    """Scales in tiles of 128x4 as float64 [rows, blocks], element by element."""
    across = -(-blocks // 4)
    assert scale.is_contiguous()
    assert scale.numel() == -(-rows // 128) * 128 * across * 4
    row, block = torch.arange(rows)[:, None], torch.arange(blocks)[None]
    tile = row // 128 * across + block // 4
    return scale.flatten().float()[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4].double()


def scaled_mm_emulator(
    a: Tensor,
    b: Tensor,
    scale_a: Any,
    kind_a: Any,
    scale_b: Any,
    kind_b: Any,
    swizzle_a: Any = None,
    swizzle_b: Any = None,
    output_dtype: torch.dtype | None = BF16,
) -> Tensor:
    """aten::_scaled_mm_v2 on CUDA."""
    x, w = values(a), values(b.t())
    (m, k), n = x.shape, w.shape[0]
    assert a.is_contiguous()
    assert b.t().is_contiguous()
    assert n % 16 == 0
    if kind_a == ScalingType.BlockWise1x128:
        assert kind_b == ScalingType.BlockWise128x128
        assert m % 4 == 0, "cuBLAS wants columns of scales at multiples of 16 bytes"
        padded = -(-(k // 128) // 4) * 4
        assert (scale_a.shape, scale_a.stride(0)) == ((m, k // 128), 1)
        assert scale_a.shape[1] == 1 or scale_a.stride(1) == m
        assert (scale_b.shape, scale_b.stride(0)) == ((padded, n // 128), 1)
        assert scale_b.shape[1] == 1 or scale_b.stride(1) == padded
        assert scale_a.dtype == scale_b.dtype == FP32
        x = x * scale_a.double().repeat_interleave(128, 1)
        w = w * scale_b.t()[:, : k // 128].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        return (x @ w.t()).to(output_dtype)
    block, dtype = {
        ScalingType.BlockWise1x32: (32, torch.float8_e8m0fnu),
        ScalingType.BlockWise1x16: (16, torch.float8_e4m3fn),
    }[kind_a[0]]
    assert kind_a == kind_b
    assert swizzle_a == swizzle_b
    assert swizzle_a[0] == SwizzleType.SWIZZLE_32_4_4
    assert scale_a[0].dtype == scale_b[0].dtype == dtype
    x = x * unswizzled(scale_a[0], m, k // block).repeat_interleave(block, 1)
    w = w * unswizzled(scale_b[0], n, k // block).repeat_interleave(block, 1)
    for scale in (*scale_a[1:], *scale_b[1:]):
        assert (scale.dtype, scale.numel(), kind_a[1]) == (FP32, 1, ScalingType.TensorWise)
        x = x * scale.double()
    return (x @ w.t()).to(output_dtype)


def past_the_end(y: Tensor, ends: Tensor) -> Tensor:
    """Fill the rows past the last end, which are uninitialized memory, with NaN."""
    y[int(ends[-1]) :] = float("nan")
    return y


def grouped_mm_emulator(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
    assert a.dtype == b.dtype == BF16
    assert a.shape[1] % 8 == b.shape[2] % 8 == a.data_ptr() % 16 == b.data_ptr() % 16 == 0
    return past_the_end(torch._grouped_mm(a, b, offs=offs), offs)


def scaled_grouped_mm_emulator(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, offs: Tensor, out_dtype: torch.dtype
) -> Tensor:
    assert a.dtype == b.dtype == torch.float8_e4m3fn
    assert a.is_contiguous()
    assert b.transpose(-1, -2).is_contiguous()
    assert a.shape[1] % 16 == b.shape[2] % 16 == 0
    assert (scale_a.shape, scale_b.shape) == (a.shape[:1], (b.shape[0], b.shape[2]))
    assert scale_a.dtype == scale_b.dtype == FP32
    assert scale_a.is_contiguous()
    assert scale_b.stride(-1) == 1
    y, start = torch.empty(a.shape[0], b.shape[2], dtype=out_dtype), 0
    for expert, end in enumerate(offs.tolist()):
        exact = a[start:end].double() @ b[expert].double()
        y[start:end] = exact * scale_a[start:end, None].double() * scale_b[expert].double()
        start = end
    return past_the_end(y, offs)


def mps_int4_emulator(x: Tensor, data: Tensor, group: int, pairs: Tensor) -> Tensor:
    """The Metal kernel: bytes are [N, K/2] whatever the shape says, and the pair is rounded to x's dtype before use."""
    n, k = data.shape[0] * 8, x.shape[1]
    assert x.is_contiguous()
    assert data.is_contiguous()
    assert (data.dtype, data.dim(), data.numel()) == (torch.int32, 4, n * k // 8)
    assert group in (32, 64, 128, 256)
    assert (pairs.shape, pairs.dtype) == ((k // group, n, 2), x.dtype)
    raw = data.contiguous().view(torch.uint8).reshape(n, k // 2)
    codes = torch.stack([raw & 15, raw >> 4], -1).reshape(n, k).double()
    scale, shift = pairs.transpose(0, 1).unbind(-1)
    offset = shift - scale * 8
    weight = codes * scale.double().repeat_interleave(group, 1) + offset.double().repeat_interleave(group, 1)
    return (x.double() @ weight.t()).to(x.dtype)


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_mm", scaled_mm_emulator)
    monkeypatch.setattr(F, "grouped_mm", grouped_mm_emulator)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", scaled_grouped_mm_emulator)
    monkeypatch.setattr(torch, "_weight_int4pack_mm", mps_int4_emulator)


KERNELS: dict[str, tuple[Any, Callable[..., str | None], str, tuple[str, ...], tuple[torch.dtype, ...]]] = {
    # run, refuses, layout, schemes, dtypes
    "blocks": (scaled_mm_blocks.run, scaled_mm_blocks.refuses, "plain", ("fp8-block",), (BF16,)),
    "mx": (scaled_mm_mx.run, scaled_mm_mx.refuses, "plain", ("mxfp8", "nvfp4"), (BF16,)),
    "mps-int4": (
        mps_int4pack_mm.run,
        mps_int4pack_mm.refuses,
        "int4_pairs",
        ("int4", "int4-sym", "int4-g32-fzero", "int4-g64"),
        (BF16, FP16, FP32),
    ),
    "mps-int8": (int8pack_mm.run, mps.int8pack_mm_refuses, "signed_int8", ("int8",), (BF16, FP16, FP32)),
}
CASES = [
    pytest.param(*kernel[:3], scheme, dtype, shape, id=f"{name}-{scheme}-{str(dtype)[6:]}-{shape[0]}x{shape[1]}")
    for name, kernel in KERNELS.items()
    for scheme in kernel[3]
    for dtype in kernel[4]
    for shape in ((128, 256), (256, 640))
]


@pytest.mark.parametrize(("run", "refuses", "layout", "scheme", "dtype", "shape"), CASES)
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
def test_within_budget(
    run: Any, refuses: Any, layout: str, scheme: str, dtype: torch.dtype, shape: tuple[int, int], with_bias: bool
) -> None:
    """A bias added to a rounded product is one more rounding, and so is the shift of a zero point on MPS."""
    refused, missed = {}, {}
    for sample in products(scheme, dtype, layout, *shape, with_bias=with_bias):
        zeros = int(layout == "int4_pairs" and sample.args[3] is not None)
        allowed = 10 * math.log10(1 + (int(with_bias) + zeros) / 2)
        if reason := refuses(*sample.args):
            refused[sample.name] = reason
        elif (gap := shortfall(sample, run(*sample.args))) > allowed:
            missed[sample.name] = gap
    assert missed == {}
    assert refused in ({}, {f"{scheme}-empty": "x has no rows"})


@pytest.mark.parametrize(
    ("op", "kernel", "schemes"),
    [
        ("grouped_linear", grouped_mm, {"int4", "int8", "fp8"}),
        ("dyn_grouped_linear", scaled_grouped_mm, {"fp8"}),
    ],
    ids=["grouped", "scaled"],
)
def test_experts(op: str, kernel: Any, schemes: set[str]) -> None:
    """The op's samples: uneven experts, unassigned rows, experts without rows; x within a larger buffer."""
    taken = set()
    for sample in OPS[op].samples(CPU, BF16):
        x = sample.args[0]
        x.set_(torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape))
        args = sixteens(sample.args) if kernel is scaled_grouped_mm else sample.args
        if kernel.refuses(*args) is None:
            got = kernel.run(*args)
            expected = sample.expected() if args is sample.args else OPS[op].generic(*args).double()
            assert got.isfinite().all()
            assert (got[int(args[1][-1]) :] == 0).all()
            noise, power = (got.double() - expected).square().sum(), expected.square().sum()
            assert 10 * (power / noise).log10() >= sample.budget or noise == 0, sample.name
            taken.add(sample.name.split("-")[0])
    assert schemes <= taken


def sixteens(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same experts cut to the first 16 rows and the first 64 columns."""
    x, ends, data, *rest = args
    weight = Weight(data, *rest[:9])
    if weight.data.dtype != torch.float8_e4m3fn or weight.block_k < weight.k or weight.block_n > 1:
        return args
    cut = weight._replace(
        data=weight.data.view(torch.uint8)[:, :16, :64].contiguous().view(weight.data.dtype),
        scale=weight.scale[:, :16].contiguous(),
        n=16,
        k=64,
        block_k=64,
    )
    return (x[:, :64].contiguous(), ends, *cut, *rest[9:])


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
def test_a_dense_weight_is_the_generic_kernels(dtype: torch.dtype) -> None:
    for sample in OPS["linear"].samples(CPU, dtype):
        got, wanted = dense_mm.run(*sample.args), OPS["linear"].generic(*sample.args)
        assert torch.equal(bits(got), bits(wanted)), sample.name


def test_a_dense_weight_is_made_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel chosen for dequantize on that device."""
    sample = next(iter(products("int4", BF16, "plain", 128, 256, m=5, with_bias=False)))
    monkeypatch.setitem(CHOOSERS, "dequantize", lambda *args: torch.ones(128, 256, dtype=args[-1]))
    assert torch.equal(dense_mm.run(*sample.args), sample.args[0] @ torch.ones(256, 128, dtype=BF16))


class Moved(TorchDispatchMode):
    """Counts the bytes that ops read and write, each op separately."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.bytes += sum(each.nbytes for each in tree_leaves([args, result]) if isinstance(each, torch.Tensor))
        return result


@pytest.mark.parametrize(("costs", "layout"), [(cuda.DENSE, "tile_packed_8"), (mps.DENSE, "int4_pairs")])
def test_what_making_a_weight_dense_moves(costs: dense_mm.Costs, layout: str) -> None:
    """Bytes moved by torch's own ops, plus one read by the product: within a tenth of the constant."""
    q = bp.quantize_tensor(torch.randn(256, 1024, dtype=BF16), "int4").to_layout(layout)
    with Moved() as moved:
        dense = OPS["dequantize"].generic(*operand(q), BF16)
    assert (moved.bytes + dense.nbytes) / dense.numel() == pytest.approx(costs.moved, rel=0.1)


@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (33, 4), (128, 5), (130, 12), (300, 3)])
def test_scales_in_tiles(rows: int, blocks: int) -> None:
    scale = torch.arange(rows * blocks).remainder(254).to(torch.uint8).reshape(rows, blocks)
    tiles = scaled_mm_mx.swizzled(scale.view(torch.float8_e8m0fnu))
    assert torch.equal(unswizzled(tiles.view(torch.uint8), rows, blocks), scale.double()), (
        "each scale where the unit looks for it"
    )


def test_a_shifted_scale_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales with the blocks of each row reversed do not pass."""
    sample = next(iter(products("mxfp8", BF16, "plain", 128, 256, m=5)))
    swizzled = scaled_mm_mx.swizzled
    monkeypatch.setattr(
        scaled_mm_mx, "swizzled", lambda scale: swizzled(scale.view(torch.uint8).flip(1)).view(scale.dtype)
    )
    assert shortfall(sample, scaled_mm_mx.run(*sample.args)) > 20
