import numpy as np
import pytest
import torch

from bitport.numerics import from_storage, number_type, pack_bits, packed_size, to_storage, unpack_bits


def big_integer_pack(row: list[int], bits: int) -> list[int]:
    """The definition: element i at bits [i*b, i*b + b) of one little-endian number."""
    stream = sum(code << (i * bits) for i, code in enumerate(row))
    return list(stream.to_bytes((len(row) * bits + 7) // 8, "little"))


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("k", [0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 101])
def test_against_the_definition(bits: int, k: int) -> None:
    rng = np.random.default_rng(100 * k + bits)
    codes = rng.integers(0, 1 << bits, (4, k))
    codes[0], codes[1] = (1 << bits) - 1, 0  # full rows must not spill into their neighbours or the fill bits
    packed = pack_bits(torch.tensor(codes, dtype=torch.uint8), bits)
    assert packed.shape == (4, packed_size(k, bits))
    assert packed.tolist() == [big_integer_pack(row, bits) for row in codes.tolist()]
    assert unpack_bits(packed, bits, k).tolist() == codes.tolist()


def test_the_diagrams() -> None:
    assert pack_bits(torch.tensor([0x1, 0x2, 0x3, 0x4], dtype=torch.uint8), 4).tolist() == [0x21, 0x43]
    three = pack_bits(torch.tensor([1, 2, 3, 4, 5, 6, 7, 0], dtype=torch.uint8), 3)
    assert three.tolist() == [0b11_010_001, 0b0_101_100_0, 0b000_111_11]


@pytest.mark.parametrize("bits", [3, 4])
def test_batches_and_strides(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (2, 5, 3, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    view = codes.transpose(0, 2)[..., ::2]
    packed = pack_bits(view, bits)
    assert torch.equal(packed, pack_bits(view.contiguous(), bits))
    assert torch.equal(unpack_bits(packed.transpose(0, 1), bits, 12), view.transpose(0, 1))
    assert packed.is_contiguous()


def test_wrong_input_is_named() -> None:
    codes = torch.zeros(2, 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="bits=9"):
        pack_bits(codes, 9)
    with pytest.raises(TypeError, match="int64"):
        pack_bits(codes.long(), 4)
    with pytest.raises(ValueError, match="take 4 bytes"):
        unpack_bits(codes, 4, 8)
    with pytest.raises(TypeError, match="int8"):
        unpack_bits(codes.to(torch.int8), 4, 16)


@pytest.mark.parametrize("name", ["int3", "float6_e2m3", "nf4", "float8_e4m3", "float8_e5m2"])
def test_storage_round_trip(name: str) -> None:
    number = number_type(name)
    codes = torch.arange(2 * 256, dtype=torch.int32).remainder(1 << number.bits).to(torch.uint8).reshape(2, 256)
    data = to_storage(codes, number)
    assert data.dtype == number.storage
    assert data.shape == (2, 256 * number.bits // 8)
    assert torch.equal(from_storage(data, number, 256), codes)
