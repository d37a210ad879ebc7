"""The native library packs codes into tiles and unpacks them to the same bytes as the layout's torch ops."""

from __future__ import annotations

import pytest
import torch

from bitport.backends import cpu
from bitport.backends.cpu.native import Library
from bitport.layouts import Matrix
from bitport.layouts.cpu_tiles import pack_tiles, unpack_tiles
from bitport.numerics import NUMBER_TYPES, to_storage

SHAPES = [(1, 1), (5, 33), (32, 32), (33, 64), (64, 40), (70, 1000), (31, 259), (100, 17)]


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_bytes_of_tiles(bits: int, n: int, k: int) -> None:
    if not isinstance(cpu.LIBRARY, Library):
        pytest.skip("the native kernels were not compiled")
    number = NUMBER_TYPES[f"int{bits}"]
    whole = Matrix(number.name, -(-n // 32) * 32, -(-k // 32) * 32, 1, 1024)
    codes = torch.randint(0, 2**bits, (2, whole.n, whole.k), dtype=torch.uint8)
    matrix, dense = whole._replace(n=n, k=k), to_storage(codes[:, :n, :k].contiguous(), number)
    assert torch.equal(cpu.LIBRARY.pack(matrix, dense), pack_tiles(matrix, dense))
    filled_up = pack_tiles(whole, to_storage(codes, number))  # the padding is not zero
    assert torch.equal(cpu.LIBRARY.unpack(matrix, filled_up), dense)
    assert torch.equal(unpack_tiles(matrix, filled_up), dense)
