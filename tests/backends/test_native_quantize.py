"""The native quantize kernel gives the bits of the generic one, in every variant that this processor can run. NaN
scales are compared as NaN: their sign depends on PyTorch's division and cast."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import bitport as bp
from bitport.backends.cpu.native import Library
from bitport.layouts import large_pages
from bitport.numerics import NUMBER_TYPES, Format, NumberType, Quantized
from bitport.ops import decide, select, use_kernel
from bitport.ops.convert import format_json, from_list, quantize_into
from bitport.schemes import PRESETS, Scheme, preset
from tests.backends.edges import same, weight
from tests.backends.taken import compiled

pytestmark = compiled
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
NAMES = (
    *(name for name, scheme in PRESETS.items() if not scheme.static),
    *("int3-channel", "int4-g32-sym", "int4-g48", "int4-g64-fzero", "int4-tensor", "int4-b8x16-sym", "int5-g7"),
    *("int6-tensor-sym", "int7-b128x128", "int8-asym", "fp8-e5m2-wo-g64", "mxfp4-g16", "nvfp4-b3x16", "nf4-channel"),
)


def parts_of(x: Tensor, fmt: Format, kernel: str) -> Quantized:
    with use_kernel(f"quantize={kernel}"):
        return from_list(select.call("quantize", x, format_json(fmt), kernel=kernel))


def differing(x: Tensor, fmt: Format) -> list[str]:
    """Names of the parts that differ."""
    assert decide("quantize", x, format_json(fmt)).kernel == "native"
    got, expected = (parts_of(x, fmt, kernel) for kernel in ("native", "generic"))
    got, expected = (parts._replace(data=parts.data.view(torch.uint8)) for parts in (got, expected))
    pairs = zip(Quantized._fields, got, expected, strict=True)
    return [name for name, a, b in pairs if (a is None) != (b is None) or not (a is None or b is None or same(a, b))]


@DTYPES
@pytest.mark.parametrize("name", NAMES)
def test_schemes(library: Library, name: str, dtype: torch.dtype) -> None:
    fmt = preset(name).weight
    for seed, (n, k) in enumerate([(1, 1), (5, 33), (40, 160), (131, 300), (2, 2100)]):
        assert not differing(weight(n, k, dtype, seed), fmt), (n, k)


def formats_of(number: NumberType) -> Iterator[Format]:
    """Every scale and zero, also those without a preset: float16 scales are clipped for large float32 numbers."""
    for scale in ("bfloat16", "float16", "e4m3"):
        for zero in ("none", "int", "float") if number.kind == "int" and scale != "e4m3" else ("none",):
            yield Format(dtype=number.name, block=(1, 32), zero=zero, scale=scale)
    for rule in ("floor", "ceil", "rceil", "even"):
        if number.has_zero and (rule, number.kind) != ("even", "codebook"):
            yield Format(dtype=number.name, block=(1, 32), scale="e8m0", scale_rule=rule)


@DTYPES
@pytest.mark.parametrize("name", [name for name in NUMBER_TYPES if name != "float8_e8m0"])
def test_formats(library: Library, name: str, dtype: torch.dtype) -> None:
    for fmt in formats_of(NUMBER_TYPES[name]):
        assert not differing(weight(17, 100, dtype), fmt), fmt


@pytest.mark.parametrize("name", ["int4-tensor", "fp8", "int8-b8x16", "nvfp4", "int4", "fp8-block"])
def test_threads_change_nothing(name: str) -> None:
    fmt, x = preset(name).weight, weight(150, 700, torch.bfloat16)[13:]
    torch.set_num_threads(1)
    alone = parts_of(x, fmt, "native")
    torch.set_num_threads(3)
    try:
        shared = parts_of(x, fmt, "native")
    finally:
        torch.set_num_threads(1)
    assert all(a is None or b is None or same(a, b) for a, b in zip(shared, alone, strict=True))


@pytest.mark.parametrize("scale", [1.0, 3e-39, 1e36], ids=["ordinary", "subnormal", "large"])
def test_quotients_are_rounded_once(library: Library, scale: float) -> None:
    """Float32 scales have 24 bits: a quotient off by one bit sometimes falls on the other side of a tie."""
    made = torch.Generator().manual_seed(7)
    x = torch.randn(2000, 64, generator=made)
    steps = torch.randint(-126, 127, x.shape, generator=made) + 0.5
    near = steps * (x.abs().amax(1, keepdim=True) / 127)
    x[:, 1:] = torch.nextafter(near, near + torch.randint(-1, 2, near.shape, generator=made) * near)[:, 1:]
    x = x * scale
    assert not differing(x, Format(dtype="int8"))
    assert not differing(x, Format(dtype="int4", block=(1, 16), zero="int"))
    assert not differing(x, Format(dtype="float8_e4m3", block=(1, 16)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_ties_of_short_numbers(library: Library, dtype: torch.dtype) -> None:
    """16-bit numbers and scales take one correction less: at ties, and next to them on both sides."""
    made = torch.Generator().manual_seed(11)
    most = torch.rand(4000, 1, generator=made).to(dtype) + 1
    for fmt, largest in ((Format(dtype="int8"), 127), (Format(dtype="float8_e4m3", block=(1, 64), scale="input"), 448)):
        scale = (most.float() / largest).to(dtype).float()
        ties = (torch.randint(-largest, largest, (4000, 64), generator=made) + 0.5) * scale
        beside = torch.randint(-1, 2, ties.shape, generator=made, dtype=torch.int16)
        x = (ties.to(dtype).view(torch.int16) + beside).view(dtype).clamp(-most, most)
        x[:, :1] = most
        assert not differing(x, fmt)
        assert not differing(x, Format(dtype="int4", block=(1, 16), zero="int"))


def test_experts_and_views() -> None:
    """Leading dimensions are matrices; a transposed or sliced weight is not contiguous."""
    every = torch.randn(3, 48, 96)
    for name in ("int4-g32", "nvfp4"):
        for x in (every, every.transpose(-1, -2), every[:, ::2, 3:67], every[1].t()):
            assert not differing(x, preset(name).weight)


@pytest.mark.skipif(large_pages.ADVICE is None, reason="the system has no large pages to ask for")
@pytest.mark.parametrize("name", ["int4", "fp8-wo"])
def test_many_codes_lie_in_large_pages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Recorder(mmap.mmap):
        def __new__(cls, where: int, length: int, **options: int) -> Recorder:
            asked.append(length)
            return super().__new__(cls, where, length, **options)

    monkeypatch.setattr(large_pages.mmap, "mmap", Recorder)
    x, fmt = torch.randn(2, 2048, 1024), preset(name).weight
    expected, size = parts_of(x, fmt, "native"), x.numel() * fmt.number.bits // 8
    assert not asked
    for kept, count in ((size, 0), (size - 1, 1)):
        monkeypatch.setattr(large_pages, "KEPT", kept)
        with torch.device("meta"):
            made = parts_of(x, fmt, "native")
        assert asked == [size + large_pages.PAGE] * count
        assert same(made.data.view(torch.uint8), expected.data.view(torch.uint8))


def test_models_are_quantized_by_it() -> None:
    x = torch.randn(64, 96)
    native = bp.quantize_tensor(x, "int4-g32")
    with use_kernel("quantize=generic"):
        generic = bp.quantize_tensor(x, "int4-g32")
    assert all(a is None or b is None or torch.equal(a, b) for a, b in zip(native.parts, generic.parts, strict=True))


def test_an_empty_matrix_is_refused() -> None:
    refused = decide("quantize", torch.empty(0, 16), format_json(preset("int4-g16").weight))
    assert refused.kernel == "generic"
    assert refused.refused == (("native", "an empty matrix has nothing to round: [0, 16]"),)


def test_a_new_number_type_goes_to_the_generic_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native ones decode floats of 8 bits as e4m3 or e5m2, whatever they are called."""
    new = NumberType("float8_e3m4", 8, "float", exponent_bits=3, mantissa_bits=4, bias=3, specials="ieee")
    monkeypatch.setitem(NUMBER_TYPES, new.name, new)
    fmt, x = Format(dtype=new.name), torch.randn(64, 96)
    refused = decide("quantize", x, format_json(fmt))
    assert refused.kernel == "generic"
    assert refused.refused == (("native", f"the native library does not encode {new.name}"),)
    weight = bp.quantize_tensor(x, Scheme(weight=fmt))
    assert weight.bits_layout == "plain"
    value = weight.dequantize()
    # half a step: 2^-5 of a normal number, 2^-7 of the scale below; and what float32 division and product add
    assert ((value - x).abs() <= torch.maximum(x.abs() * 2.0**-5, weight.scale * 2.0**-7) * (1 + 2.0**-20)).all()
    rows = torch.randn(4, 96)
    assert torch.allclose(F.linear(rows, weight), rows @ value.T, rtol=0, atol=96 * 2.0**-23 * 16)


@pytest.mark.parametrize("name", ["int8", "int4-g32", "int3-g16-fzero", "int2-b8x1", "fp8-wo", "mxfp4-wo"])
def test_parts_are_written_where_they_belong(library: Library, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a copy: the op, which returns new tensors, is not called."""
    fmt, x = preset(name).weight, torch.stack([weight(16, 96, torch.bfloat16, seed) for seed in range(3)])
    wanted = from_list(select.call("quantize", x, format_json(fmt)))
    found = [None if part is None else torch.zeros_like(part) for part in wanted[:3]]
    monkeypatch.setattr(select, "call", lambda *_, **__: pytest.fail("copied"))
    for first in (0, 8):
        quantize_into(x[:, first : first + 8], fmt, first, *found)  # type: ignore[arg-type]
    for one, other in zip(wanted, found, strict=False):
        assert one is None or torch.equal(one.view(torch.uint8), other.view(torch.uint8))
