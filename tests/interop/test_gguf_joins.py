"""Weights encoded as ggml blocks: the library ``gguf`` reads exactly the same numbers, and weights that came from a
file are written as the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import bitport
from bitport.errors import ArgumentError
from bitport.interop.gguf import joins
from bitport.interop.gguf.blocks import BLOCKS, decoded
from bitport.interop.gguf.factors import factors, minimum
from bitport.interop.gguf.joins import joined, kinds
from bitport.numerics import Format, Quantized, pack_bits
from bitport.schemes import Scheme, preset
from bitport.tensor import QTensor, from_parts

from .gguf_files import random_blocks
from .test_gguf_blocks import N, random_rows, theirs

SMALLEST = {
    "int2": "Q4_0",
    "int2-g64-sym": "Q2_0",
    "int2-channel-sym": "Q2_0",
    "int2-g32-sym": "Q4_0",
    "int3": "Q4_0",
    "int3-g64-sym": "Q4_0",
    "int4-g32-sym": "Q4_0",
    "int4-tensor-sym": "Q4_0",
    "int4-g32": "Q5_0",
    "int4": "Q5_0",
    "int5-g32-sym": "Q5_0",
    "int5": "Q8_0",
    "int6-channel-sym": "Q8_0",
    "int7-g96": "Q8_0",
    "int8": "Q8_0",
    "int8-b24x64": "Q8_0",
    "mxfp4-wo": "MXFP4",
}


def read(name: str, raw: np.ndarray | torch.Tensor) -> QTensor:
    block, rows = BLOCKS[name], torch.as_tensor(raw)
    shape = (*rows.shape[:-1], rows.shape[-1] // block.nbytes * block.elements)
    q = from_parts(decoded(block, rows), block.scheme, shape=shape, dtype=torch.bfloat16)
    assert isinstance(q, QTensor)
    return q


def quantized(scheme: str, dtype: torch.dtype = torch.bfloat16, shape: tuple[int, ...] = (N, 192)) -> QTensor:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.05
    return bitport.quantize_tensor(value.to(dtype), scheme).to_layout("plain")


def made_of(scheme: str, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None) -> QTensor:
    its = preset(scheme)
    parts = Quantized(pack_bits(codes.to(torch.uint8), its.weight.number.bits), scale, zero)
    q = from_parts(parts, its, shape=tuple(codes.shape), dtype=torch.float32)
    assert isinstance(q, QTensor)
    return q


def blocks_of_llama_cpp(name: str) -> np.ndarray:
    """Random blocks in which the largest factor is at the end of its range, as always in llama.cpp; none is 0."""
    nbytes = BLOCKS[name].nbytes
    raw = random_blocks(name, N, 768).reshape(-1, nbytes)
    if name == "Q6_K":
        raw[:, 195] = 0x80  # s = -128
    if name == "Q3_K":
        raw[:, 96] &= 0xF0  # s = -32: its low four bits, and two high ones
        raw[:, 104] &= 0xFC
    if name == "Q2_K":
        raw[:, :16] |= 0x11
        raw[:, 5] = 0xFF  # s = t = 15
    if name == "IQ4_XS":
        raw[:, 2] &= 0xFC  # s = -32
        raw[:, 4] &= 0xF0
    if name in ("Q4_K", "Q5_K"):
        raw[:, 4:16] |= 0x11
        raw[:, 6] |= 63  # s[2], t[2]
        raw[:, 10] |= 63
    return raw.reshape(N, -1)


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"])
def test_k_quants_go_back_to_the_same_bytes(name: str) -> None:
    raw = blocks_of_llama_cpp(name)
    kind, again = joined(read(name, raw))
    assert kind == name
    assert np.array_equal(again.numpy(), raw)


@pytest.mark.parametrize("name", ["Q1_0", "Q2_0", "Q4_0", "Q5_0", "Q8_0", "Q4_1", "Q5_1", "IQ4_NL", "TQ2_0", "MXFP4"])
def test_others_too(name: str) -> None:
    halves = (2.0**-24, -(2.0**-24), 3 * 2.0**-17, -1.5, 0.0123, 65504.0)
    raw = random_rows(name, halves)
    kind, again = joined(read(name, raw))
    assert kind == name
    assert np.array_equal(again.numpy(), raw)


def some_constant(name: str) -> np.ndarray:
    """The first group of each block has the scale 0 and codes 0; with each second minimum also 0."""
    raw = blocks_of_llama_cpp(name).reshape(-1, BLOCKS[name].nbytes)
    if name in ("Q4_1", "Q5_1"):
        raw[:, :2] = raw[:, 4:] = 0
        halves = np.array([0, -0.0, 0.0123, -0.0123, 2.0**-24, -65504, np.inf, -np.inf], np.float16)
        raw[:, 2:4] = np.resize(halves, (len(raw), 1)).view(np.uint8)
    elif name == "Q2_K":
        raw[:, 0] &= 0xF0
        raw[::2, 0] = 0
        raw[:, 16:32] &= 0xFC
    else:
        raw[:, 4] &= 0xC0
        raw[::2, 8] &= 0xC0
        raw[:, 16:48] &= 0xF0 if name == "Q4_K" else 0xFE
        if name == "Q5_K":
            raw[:, 48:80] &= 0xF0
    return raw.reshape(N, -1)


@pytest.mark.parametrize("unit", [False, True], ids=["by their number", "scale 1"])
@pytest.mark.parametrize("name", ["Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"])
def test_constant_blocks_go_back_to_the_same_bytes(name: str, unit: bool) -> None:
    raw = some_constant(name)
    q = read(name, raw)
    data, scale, zero, _ = q.plain()
    assert zero is not None
    if unit:
        constant = torch.zeros_like(scale, dtype=torch.bool)
        constant[:, :: BLOCKS[name].elements // q.matrix.block_k] = True
        parts = Quantized(data, scale.masked_fill(constant, 1), torch.where(constant, scale * zero, zero))
        made = from_parts(parts, q.scheme, shape=tuple(q.shape), dtype=q.dtype)
        assert isinstance(made, QTensor)
        assert torch.equal(made.dequantize(torch.float32), q.dequantize(torch.float32))
        q = made
    kind, again = joined(q)
    assert kind == name
    assert np.array_equal(again.numpy(), raw)


@pytest.mark.parametrize("name", joins.JOINS)
def test_any_block_goes_back_to_the_same_numbers(name: str) -> None:
    """If factors are smaller, or d is 0, several blocks have the same value."""
    for raw in (random_rows(name), random_rows(name, (0.0, 2.0**-24, 0.0123))):
        before = read(name, raw)
        kind, again = joined(before)
        assert kind == name
        for one, other in zip(before.plain(), read(name, again).plain(), strict=True):
            assert one is other is None or torch.equal(one.float(), other.float())
        with np.errstate(over="ignore"):
            assert torch.equal(theirs(name, again.numpy()), theirs(name, raw))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", SMALLEST)
def test_the_library_finds_the_same_numbers(scheme: str, dtype: torch.dtype) -> None:
    """Both compute a product of at most 8 and 11 bits: nothing is rounded."""
    q = quantized(scheme, dtype)
    kind, raw = joined(q)
    assert kind == SMALLEST[scheme]
    assert torch.equal(theirs(kind, raw.numpy()), q.dequantize(torch.float32))


def test_prisms_larger_blocks_are_written_in_two() -> None:
    raw = random_rows("PQ2_0")
    kind, again = joined(read("PQ2_0", raw))
    assert kind == "Q2_0"
    assert torch.equal(theirs("Q2_0", again.numpy()), theirs("PQ2_0", raw))


def test_a_minimum_that_is_a_half() -> None:
    """In that case the zero point takes no bit, and reading gives the same codes and zero points."""
    draw = torch.Generator().manual_seed(0)
    for scheme, bits, kind in (("int4-g32", 4, "Q4_1"), ("int5-g32", 5, "Q5_1")):
        codes = torch.randint(0, 1 << bits, (N, 96), generator=draw)
        zero = torch.randint(0, 1 << bits, (N, 3), generator=draw, dtype=torch.uint8)
        scale = 2.0 ** torch.randint(-6, 1, (N, 3), generator=draw) * 1.5
        q = made_of(scheme, codes, scale, zero)
        found, raw = joined(q)
        assert found == kind
        assert torch.equal(theirs(kind, raw.numpy()), q.dequantize(torch.float32))
        data, _, floats, _ = read(kind, raw).plain()
        assert torch.equal(data, q.plain().data)
        assert floats is not None
        assert torch.equal(floats, zero.float())


def test_experts_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joins, "CHUNK", 5 * 192)
    for scheme in ("int4", "int8-b24x64"):
        q = quantized(scheme, shape=(3, N, 192))
        kind, raw = joined(q)
        assert raw.shape[:2] == (3, N)
        found = torch.stack([theirs(kind, each.numpy()) for each in raw])
        assert torch.equal(found, q.dequantize(torch.float32))


def test_all_weights_of_a_scheme_have_one_type_where_they_must() -> None:
    assert kinds(preset("int4-g32"), 64) == ["Q4_1", "Q5_0", "Q5_1", "Q8_0"]
    assert kinds(preset("int4-g32"), 64, whole=True) == ["Q5_0", "Q8_0"]
    assert kinds(preset("int6-g16-sym"), 256, whole=True) == ["Q6_K"]


@pytest.mark.parametrize("scheme", ["nf4", "fp8-wo", "int4-g16", "int4-g48", "int6-g16", "mxfp8-wo"])
def test_no_type_holds_these(scheme: str) -> None:
    assert kinds(preset(scheme), 768) == []


def test_rows_of_whole_blocks() -> None:
    assert kinds(preset("int8"), 80) == []
    assert kinds(Scheme(weight=Format(dtype="int1", block=(1, 32))), 64) == []
    assert kinds(preset("int3-g16-sym"), 128) == []


@pytest.mark.parametrize(
    ("q", "reason"),
    [
        (quantized("int8", torch.float32), r"Q8_0: a scale: .* is no float16; --scales float16"),
        (made_of("int4-g32-sym", torch.zeros(1, 32), torch.full((1, 1), 7e4)), "70000"),
        (
            made_of("int4-g32-fzero", *(torch.ones(1, 32), torch.ones(1, 1), torch.full((1, 1), 0.3))),
            "no whole numbers",
        ),
        (
            made_of(
                "int8-g32-asym",
                torch.arange(224, 256).unsqueeze(0),
                torch.ones(1, 1),
                torch.ones(1, 1, dtype=torch.uint8),
            ),
            "from -128 to 127, here are 223 to 254",
        ),
        (made_of("int6-g16-sym", torch.zeros(1, 256), torch.linspace(1, 2, 16)[None]), "from -128 to 127"),
        (made_of("int6-g16-sym", torch.zeros(1, 256), torch.full((1, 16), torch.nan)), "no float16 times whole"),
        (made_of("int6-g16-sym", torch.zeros(1, 256), torch.full((1, 16), torch.inf)), "no float16 times whole"),
        (made_of("int2-g16-fzero", *(torch.ones(1, 256), torch.ones(1, 16), torch.full((1, 16), torch.nan))), "nan"),
    ],
)
def test_numbers_that_no_type_holds(q: QTensor, reason: str) -> None:
    with pytest.raises(ArgumentError, match=reason):
        joined(q)


def test_an_exponent_that_is_no_number() -> None:
    scale = torch.full((1, 1), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    parts = Quantized(torch.zeros(1, 16, dtype=torch.uint8), scale, None)
    q = from_parts(parts, preset("mxfp4-wo"), shape=(1, 32), dtype=torch.float32)
    assert isinstance(q, QTensor)
    with pytest.raises(ArgumentError, match="no number"):
        joined(q)


def test_factors_are_the_largest_whole_numbers() -> None:
    d, s = factors(torch.tensor([[0.5, -1.0, 0.25], [0.0, 0.0, 0.0]]), -32, 31)
    assert d.tolist() == [1.0 / 32, 0.0]
    assert s.tolist() == [[16, -32, 8], [0, 0, 0]]


def test_a_minimum_survives_the_rounding_of_its_zero_point() -> None:
    """Every m of 17 bits is recovered, whatever the scale."""
    draw = torch.Generator().manual_seed(0)
    m = torch.randint(1, 1 << 17, (100_000,), generator=draw) * 2.0**-20
    scale = (torch.rand(100_000, generator=draw) + 0.01) * 2.0 ** torch.randint(-9, 9, (100_000,), generator=draw)
    assert torch.equal(minimum(scale, m / scale, 17), m.double())
