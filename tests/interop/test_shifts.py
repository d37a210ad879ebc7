"""Blocks of equal numbers, in files of scale 0: products with them against float64, and their way back to files."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from bitport.backends import cpu
from bitport.backends.cpu.native import ISAS, Library
from bitport.interop import hqq, mlx
from bitport.interop.gguf.blocks import BLOCKS, decoded
from bitport.interop.shifts import of_constants, of_shifts, to_shifts
from bitport.numerics import Format, Quantized, pack_bits, sqnr
from bitport.ops import samples
from bitport.schemes import Scheme
from bitport.tensor import QTensor, from_parts

N, K, GROUP = 64, 1024, 32
LIBRARY = cpu.LIBRARY
VARIANTS = LIBRARY.available if isinstance(LIBRARY, Library) else ("generic",)
SUBNORMAL = 2.0**-140
NUMBERS = (0.0, -0.0, SUBNORMAL, -SUBNORMAL, 1e-20, 0.02, -0.3, 7.0, -3e38)


def held(parts: Quantized, fmt: Format, k: int = K) -> QTensor:
    q = from_parts(parts, Scheme(weight=fmt), shape=(parts.data.shape[0], k), dtype=torch.float32)
    assert isinstance(q, QTensor)
    return q


def constants(bits: int) -> tuple[QTensor, torch.Tensor]:
    """A weight of blocks with scale 0, and its value."""
    draw = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (N, K), generator=draw, dtype=torch.uint8)
    shift = torch.randn(N, K // GROUP, generator=draw) * 0.02
    shift[5] = 0
    return held(*of_shifts(codes, torch.zeros_like(shift), shift, bits, GROUP)), shift.repeat_interleave(GROUP, -1)


@pytest.fixture(params=VARIANTS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if isinstance(LIBRARY, Library):
        monkeypatch.setattr(LIBRARY, "isa", ISAS[request.param])
    return str(request.param)


def lost(isa: str, m: int, bits: int) -> float:
    """dB by which the budget of a product is less. Some variants multiply a few rows of float32 by codes less the
    midpoint h, here -h, and subtract zero less h, here -h - 1 or 1 - h, times the sum of x: the difference of h and
    h + 1 sums of x, each with the error that the budget allows for one."""
    h = 1 << bits - 1
    return 10 * math.log10(h**2 + (h + 1) ** 2) if m <= 8 and isa in ("avx2", "neon", "neon_dot", "neon_matrix") else 0


@pytest.mark.parametrize("m", [1, 5, 40])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
def test_products_of_constant_blocks(isa: str, bits: int, m: int) -> None:
    q, value = constants(bits)
    assert torch.equal(q.dequantize(torch.float32), value)
    x = torch.randn(m, K, generator=torch.Generator().manual_seed(m))
    packed = q.to_device_layout()
    y = F.linear(x, packed)
    budget = samples.product_budget(torch.float32, K, samples.independent(m, N)) - lost(isa, m, bits)
    assert sqnr(x.double() @ value.double().T, y) > budget
    assert not y[:, 5].any()
    assert torch.equal(F.embedding(torch.arange(N), packed), value)


@pytest.mark.parametrize("name", ["Q4_1", "Q5_1"])
def test_those_of_gguf(isa: str, name: str) -> None:
    block, bits = BLOCKS[name], BLOCKS[name].scheme.weight.number.bits
    draw = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (N, K // GROUP, block.nbytes), generator=draw, dtype=torch.uint8)
    minimum = (torch.randn(N, K // GROUP, 1, generator=draw) * 0.02).half()
    raw[..., :4] = torch.cat([torch.zeros_like(minimum), minimum], -1).view(torch.uint8)
    q = held(decoded(block, raw.flatten(1)), block.scheme.weight)
    value = minimum.double().expand(-1, -1, GROUP).flatten(1)
    assert torch.equal(q.dequantize(torch.float32).double(), value)
    for m in (1, 5, 40):
        x = torch.randn(m, K, generator=draw)
        budget = samples.product_budget(torch.float32, K, samples.independent(m, N)) - lost(isa, m, bits)
        assert sqnr(x.double() @ value.T, F.linear(x, q.to_device_layout())) > budget


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_any_number_is_exact_and_goes_back(dtype: torch.dtype) -> None:
    """0, subnormal, infinite and the largest ones too; a file that has them as scale and shift gives them again."""
    number = torch.tensor([*NUMBERS, torch.finfo(dtype).max, torch.inf, -torch.inf, torch.nan]).to(dtype)
    scale, zero = of_constants(number.float())
    assert torch.equal(((0 - zero) * scale).nan_to_num(7), number.float().nan_to_num(7))
    codes = torch.randint(0, 16, (len(number), GROUP), dtype=torch.uint8)
    shift = number.unsqueeze(-1)
    q = held(*of_shifts(codes, torch.zeros_like(shift), shift, 4, GROUP), GROUP)
    assert torch.equal(q.dequantize(torch.float32)[:, :1].nan_to_num(7), shift.float().nan_to_num(7))
    again_scale, again, _ = to_shifts(q)
    assert torch.equal(again.view(torch.int32)[:-1], shift.float().view(torch.int32)[:-1])
    assert bool(again[-1].isnan())
    back = held(*of_shifts(codes * 0, again_scale, again, 4, GROUP), GROUP)
    for one, other in zip(back.plain(), q.plain(), strict=True):
        assert one is other is None or torch.equal(one.nan_to_num(7), other.nan_to_num(7))


def test_one_bit_without_zero_points() -> None:
    """It has no code for zero: the two codes are -1/2 and 1/2, in MLX and HQQ written with a shift or zero point."""
    codes = torch.randint(0, 2, (N, 64), dtype=torch.uint8)
    scale = torch.arange(1, N + 1).reshape(N, 1) / 64
    fmt = Format(dtype="int1", block=(1, 0), scale="input")
    q = held(Quantized(pack_bits(codes, 1), scale, None), fmt, 64)
    value = torch.where(codes == 1, scale / 2, -scale / 2)
    assert torch.equal(q.dequantize(), value)
    written = mlx.Writer().write("m.weight", q)
    biases, scales = (written[f"m.{role}"].repeat_interleave(64, 1) for role in ("biases", "scales"))
    assert torch.equal(codes * scales + biases, value)
    written = hqq.Writer().write("m.weight", q)
    assert torch.equal((codes - written["m.zero"]) * written["m.scale"], value)
