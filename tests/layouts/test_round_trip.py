"""unpack(pack(x)) == x, bit for bit, for every layout, random shapes, zeros, scales and batches."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitport.layouts import LAYOUTS, Matrix, layout, repack
from bitport.numerics import NUMBER_TYPES, Quantized, packed_size

WEIGHTS = [name for name, number in NUMBER_TYPES.items() if name != "float8_e8m0"]


@st.composite
def matrices(draw: st.DrawFn) -> tuple[Matrix, torch.dtype, str]:
    """(matrix, dtype of its scales, kind of zero): arbitrary ones, or those that packed layouts are made for."""
    n = draw(st.integers(0, 20))
    family = draw(st.sampled_from(["any", "groups of int4", "channels of int8", "words"]))
    if family == "groups of int4":
        matrix = Matrix(
            "int4", n, draw(st.sampled_from([32, 64, 128, 256, 384])), 1, draw(st.sampled_from([32, 64, 128, 256]))
        )
        return matrix, torch.bfloat16, draw(st.sampled_from(["none", "int", "float"]))
    if family == "channels of int8":
        k = draw(st.integers(1, 70))
        return Matrix("int8", n, k, draw(st.integers(1, 3)), k), torch.float32, "none"
    dtype = "int4" if family == "words" else draw(st.sampled_from(WEIGHTS))
    k = draw(st.integers(1, 6)) * 8 if family == "words" else draw(st.integers(0, 40))
    scale = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    return (
        Matrix(dtype, n, k, draw(st.integers(1, 5)), draw(st.integers(1, 48))),
        scale,
        draw(st.sampled_from(["none", "int", "float"])),
    )


@st.composite
def held(draw: st.DrawFn, name: str) -> tuple[Matrix, Quantized]:
    """Parts of random bits that the layout ``name`` can hold."""
    batch = draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
    matrix, scale_dtype, kind = draw(matrices())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    parts = random_parts(matrix, scale_dtype, kind, batch, generator)
    assume(layout(name).refuses(matrix, parts) is None)
    return matrix, parts


def random_parts(
    matrix: Matrix, scale_dtype: torch.dtype, kind: str, batch: tuple[int, ...], generator: torch.Generator
) -> Quantized:
    number, k = NUMBER_TYPES[matrix.dtype], matrix.k
    bits = torch.randint(
        0, 256, (*batch, matrix.n, packed_size(k, number.bits)), generator=generator, dtype=torch.uint8
    )
    if tail := k * number.bits % 8:
        bits[..., -1] &= (1 << tail) - 1  # the bits behind the last code are zero by definition
    scale = torch.randn(*batch, *matrix.grid, generator=generator).to(scale_dtype)
    zeros = {
        "none": None,
        "int": torch.randint(0, 1 << number.bits, scale.shape, generator=generator, dtype=torch.uint8),
        "float": torch.randn(scale.shape, generator=generator).to(scale_dtype),
    }
    return Quantized(bits if number.storage == torch.uint8 else bits.view(number.storage), scale, zeros[kind])


def example(*names: str) -> tuple[Matrix, Quantized] | None:
    """A matrix with two experts that all these layouts can hold."""
    odd, whole = Matrix("int4", 13, 256, 1, 128), Matrix("int4", 16, 256, 1, 128)
    for matrix, kind in ((odd, "int"), (whole, "int"), (Matrix("int8", 13, 96, 1, 96), "none")):
        parts = random_parts(matrix, torch.bfloat16, kind, (2,), torch.Generator().manual_seed(0))
        if all(layout(name).refuses(matrix, parts) is None for name in names):
            return matrix, parts
    return None


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (a, b)))


@pytest.mark.parametrize("name", LAYOUTS)
@settings(derandomize=True, deadline=None, max_examples=30, suppress_health_check=[HealthCheck.filter_too_much])
@given(data=st.data())
def test_unpack_undoes_pack(name: str, data: st.DataObject) -> None:
    matrix, parts = data.draw(held(name))
    packed = layout(name).pack(matrix, parts)
    expected = layout(name).expects(matrix)
    batch = parts.data.shape[:-2]
    assert packed.data.dtype == expected.data_dtype
    assert packed.data.shape == (*batch, *expected.data_shape)
    assert packed.scale.shape == (*batch, *expected.scale_shape)
    assert packed.zero is None or packed.zero.shape == (*batch, *(expected.zero_shape or matrix.grid))
    assert packed.data.dim() == layout(name).data_ndim + len(batch)
    for mine, back in zip(parts, layout(name).unpack(matrix, packed), strict=True):
        assert same_bits(mine, back)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if hasattr(layout(name), "rows")])
@pytest.mark.parametrize("block_n", [1, 3, 64, 200])
@pytest.mark.parametrize("kind", ["none", "int", "float"])
def test_rows_are_those_of_the_plain_parts(name: str, block_n: int, kind: str) -> None:
    n, block_n = 200, min(block_n, 200)
    matrix = Matrix("int4", n, 96, block_n, 32)
    parts = random_parts(matrix, torch.bfloat16, kind, (), torch.Generator().manual_seed(0))
    packed, found = layout(name).pack(matrix, parts), 0
    for start, stop in itertools.product((0, 3, 32, 64, 192, 200), (32, 40, 64, 192, 200)):
        cut = layout(name).rows(matrix, packed, start, stop) if start <= stop else None
        if cut is None or (block_n < n and (start % block_n or (stop % block_n and stop != n))):
            continue
        found += 1
        assert cut.data.untyped_storage().data_ptr() == packed.data.untyped_storage().data_ptr()
        piece = Matrix("int4", stop - start, 96, min(block_n, stop - start), 32)
        scales = slice(start // block_n, -(-stop // block_n))
        data, *rest = layout(name).unpack(piece, cut)
        assert torch.equal(data, parts.data[start:stop])
        for mine, part in zip(rest[:2], parts[1:3], strict=True):
            assert same_bits(mine, None if part is None else part[scales])
    assert found > 1


PAIRS = [pair for pair in itertools.product(LAYOUTS, repeat=2) if example(*pair) is not None]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_from_any_layout_to_any_other(source: str, target: str) -> None:
    found = example(source, target)
    assert found is not None
    matrix, parts = found
    there = repack(matrix, repack(matrix, parts, "plain", source), source, target)
    for mine, back in zip(parts, repack(matrix, there, target, "plain"), strict=True):
        assert same_bits(mine, back)


@pytest.mark.parametrize("name", LAYOUTS)
def test_packing_works_without_data(name: str) -> None:
    """On meta tensors, so that sizes of a checkpoint can be planned before it is read."""
    found = example(name)
    assert found is not None
    matrix, parts = found
    packed = layout(name).pack(matrix, Quantized(*(None if part is None else part.to("meta") for part in parts)))
    back = layout(name).unpack(matrix, packed)
    assert packed.data.device.type == "meta"
    assert packed.data.shape == (2, *layout(name).expects(matrix).data_shape)
    assert (back.data.shape, back.scale.shape) == (parts.data.shape, parts.scale.shape)


def test_rows_that_fill_up_a_tile_are_zeros() -> None:
    matrix = Matrix("int4", 11, 64, 1, 32)
    parts = Quantized(torch.full((11, 32), 0xFF, dtype=torch.uint8), torch.ones(11, 2).bfloat16())
    packed = layout("tile_packed_4").pack(matrix, parts)
    assert packed.data.shape == (2, 1, 32, 2)
    rows = packed.data[1].reshape(8, 4, 2)  # lanes 4r .. 4r+3 hold row r
    assert bool((rows[:3] == -1).all())
    assert not rows[3:].any()
    assert not packed.scale[:, 11:].any()


def test_scales_and_zeros_of_tiles() -> None:
    """value = (code - 8) * s + z, with z = (8 - zero) * s rounded to bfloat16; the exact zero is kept beside it."""
    matrix = Matrix("int4", 8, 64, 1, 32)
    scale = torch.rand(8, 2).bfloat16()
    zero = torch.randint(0, 16, (8, 2), dtype=torch.uint8)
    parts = Quantized(torch.zeros(8, 32, dtype=torch.uint8), scale, zero)
    packed = layout("tile_packed_2").pack(matrix, parts)
    for group in range(2):
        for row in range(8):
            s, z = packed.scale[group, row].tolist()
            assert s == scale[row, group].item()
            assert z == torch.tensor((8.0 - int(zero[row, group])) * s).bfloat16().item()
    assert packed.zero is zero


def test_pairs_share_the_bytes() -> None:
    """On MPS value = (code - 8) * s + z, as in tiles, but the data is the canonical bytes, not a copy."""
    matrix = Matrix("int4", 8, 64, 1, 32)
    data, scale = torch.randint(0, 256, (8, 32), dtype=torch.uint8), torch.rand(8, 2).half()
    zero = torch.randint(0, 16, (8, 2), dtype=torch.uint8)
    packed = layout("int4_pairs").pack(matrix, Quantized(data, scale, zero))
    assert packed.data.data_ptr() == data.data_ptr()
    s, z = packed.scale.transpose(0, 1).unbind(-1)
    assert torch.equal(s, scale)
    assert torch.equal(z, ((8 - zero.float()) * scale.float()).half())


def test_int32_words_share_the_bytes() -> None:
    matrix = Matrix("int4", 4, 32, 1, 32)
    data = torch.randint(0, 256, (4, 16), dtype=torch.uint8)
    packed = layout("plain_int32").pack(matrix, Quantized(data, torch.ones(4, 1)))
    assert packed.data.data_ptr() == data.data_ptr()
    word = int(packed.data[1, 1]) & 0xFFFFFFFF
    assert [word >> 4 * i & 0xF for i in range(8)] == [int(b) >> s & 0xF for b in data[1, 4:8] for s in (0, 4)]
    data[0, 0] ^= 0xFF
    assert int(packed.data[0, 0]) & 0xFF == int(data[0, 0])


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_words_at_an_odd_address_are_copied(offset: int) -> None:
    matrix = Matrix("int4", 4, 32, 1, 32)
    stored = torch.randint(0, 256, (64 + offset,), dtype=torch.uint8)
    data = stored[offset:].reshape(4, 16)
    packed = layout("plain_int32").pack(matrix, Quantized(data, torch.ones(4, 1)))
    assert packed.data.data_ptr() % 4 == 0
    assert torch.equal(packed.data.view(torch.uint8), data)


def test_words_of_a_slice_of_columns_are_copied() -> None:
    matrix = Matrix("int4", 4, 16, 1, 16)
    data = torch.randint(0, 256, (4, 16), dtype=torch.uint8)[:, 8:]
    packed = layout("plain_int32").pack(matrix, Quantized(data, torch.ones(4, 1)))
    assert torch.equal(packed.data.view(torch.uint8), data)
