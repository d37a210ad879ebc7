"""int4pack_mm against loops written from the contract of tinygemm, and one word packed by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bitport.errors import ArgumentError
from bitport.layouts.tile_packed import pack_tiles, unpack_tiles
from bitport.numerics import sqnr
from bitport.ops.samples import product_budget

op = torch.ops.bitport.int4pack_mm
OFFSETS = (0, 1, 8, 9, 16, 17, 24, 25)
ORDER = (7, 5, 3, 1, 6, 4, 2, 0)
"""Columns of a word from the highest nibble to the lowest."""


def words_from_the_contract(codes: Tensor, inner: int) -> Tensor:
    """Pack [N, K] to [N/8, K/(16 inner), 32, inner/2], lane by lane."""
    n, k = codes.shape
    packed = torch.zeros(n // 8, k // (16 * inner), 32, inner // 2, dtype=torch.int64)
    for tile in range(n // 8):
        for outer in range(k // (16 * inner)):
            for lane in range(32):
                for pair in range(inner // 2):
                    row = 8 * tile + lane // 4
                    base = (outer * inner + 2 * pair) * 16 + 2 * (lane % 4)
                    word = 0
                    for v in ORDER:
                        word = word << 4 | int(codes[row, base + OFFSETS[v]])
                    packed[tile, outer, lane, pair] = word - (1 << 32 if word >> 31 else 0)
    return packed.to(torch.int32)


@pytest.mark.parametrize("inner", [2, 4, 8])
def test_packing(inner: int) -> None:
    codes = torch.randint(0, 16, (16, 32 * inner), dtype=torch.uint8)
    packed = pack_tiles(codes, inner)
    assert packed.dtype == torch.int32
    assert torch.equal(packed, words_from_the_contract(codes, inner))
    assert torch.equal(unpack_tiles(packed), codes)


def test_one_word_by_hand() -> None:
    """inner 2: the word of lane 5 (row 1, base 2) holds columns 2, 3, 10, 11, 18, 19, 26, 27 of row 1."""
    codes = torch.zeros(8, 32, dtype=torch.uint8)
    codes[1, [2, 3, 10, 11, 18, 19, 26, 27]] = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8], dtype=torch.uint8)
    packed = pack_tiles(codes, 2)
    assert packed.shape == (1, 1, 32, 1)
    assert packed[0, 0, 5, 0].item() & 0xFFFFFFFF == 0x86427531
    assert packed.count_nonzero() == 1


def product_from_the_contract(x: Tensor, codes: Tensor, group: int, pairs: Tensor) -> Tensor:
    n, k = codes.shape
    value = torch.zeros(n, k, dtype=torch.float64)
    for row in range(n):
        for column in range(k):
            scale, zero = pairs[column // group, row].tolist()
            value[row, column] = (int(codes[row, column]) - 8) * scale + zero
    return x.double() @ value.T


@pytest.mark.parametrize("group", [32, 64, 128, 256])
@pytest.mark.parametrize("inner", [2, 4, 8])
def test_product(inner: int, group: int) -> None:
    n, k, m = 16, 256, 3
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    pairs = torch.randn(k // group, n, 2).bfloat16()
    x = torch.randn(m, k).bfloat16()
    y = op(x, words_from_the_contract(codes, inner), group, pairs)
    assert y.dtype == torch.bfloat16
    exact = product_from_the_contract(x, codes, group, pairs)
    assert float(sqnr(exact, y)) >= product_budget(torch.bfloat16, k, m * n)


def test_of_no_rows() -> None:
    assert op(
        torch.ones(0, 32).bfloat16(), torch.zeros(1, 1, 32, 1, dtype=torch.int32), 32, torch.ones(1, 8, 2).bfloat16()
    ).shape == (0, 8)


def test_gradient_of_self() -> None:
    codes, pairs = torch.randint(0, 16, (16, 64), dtype=torch.uint8), torch.randn(2, 16, 2).bfloat16()
    x = torch.randn(3, 64).bfloat16().requires_grad_()
    incoming = torch.randn(3, 16).bfloat16()
    op(x, pack_tiles(codes, 2), 32, pairs).backward(incoming)
    eye = torch.eye(64).bfloat16()
    exact = incoming.double() @ product_from_the_contract(eye, codes, 32, pairs).T
    assert float(sqnr(exact, x.grad)) >= product_budget(torch.bfloat16, 16, 3 * 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"self": torch.ones(2, 64)}, "self must be bfloat16.*not torch.float32", id="self-dtype"),
        pytest.param({"self": torch.ones(64).bfloat16()}, r"\[m, k\], not torch.bfloat16 \[64\]", id="self-rank"),
        pytest.param({"self": torch.ones(2, 32).bfloat16()}, "self has k=32, mat2 .* holds k=64", id="self-columns"),
        pytest.param({"mat2": torch.ones(8, 8, dtype=torch.int32)}, "mat2 must be int32", id="mat2-rank"),
        pytest.param({"mat2": torch.ones(2, 2, 32, 1, dtype=torch.int64)}, "not torch.int64", id="mat2-dtype"),
        pytest.param({"mat2": torch.ones(2, 2, 16, 1, dtype=torch.int32)}, r"\[2, 2, 16, 1\]", id="mat2-lanes"),
        pytest.param({"mat2": torch.ones(2, 1, 32, 3, dtype=torch.int32)}, "inner 2, 4 or 8", id="mat2-inner"),
        pytest.param({"group": 16}, r"one of \(32, 64, 128, 256\).*not 16", id="group-small"),
        pytest.param({"group": 0}, "not 0", id="group-zero"),
        pytest.param({"group": -32}, "not -32", id="group-negative"),
        pytest.param({"group": 128}, "divide k=64, not 128", id="group-not-dividing"),
        pytest.param({"scales_and_zeros": torch.ones(2, 16, 2)}, "not torch.float32", id="pairs-dtype"),
        pytest.param(
            {"scales_and_zeros": torch.ones(2, 8, 2).bfloat16()}, r"\[2, 16, 2\].*\[2, 8, 2\]", id="pairs-shape"
        ),
        pytest.param(
            {"self": torch.ones(2, 64, device="meta").bfloat16()}, "mat2 is on cpu, self on meta", id="device"
        ),
    ],
)
def test_wrong_arguments(changes: dict[str, object], message: str) -> None:
    args = {
        "self": torch.ones(2, 64).bfloat16(),
        "mat2": torch.zeros(2, 2, 32, 1, dtype=torch.int32),
        "group": 32,
        "scales_and_zeros": torch.ones(2, 16, 2).bfloat16(),
        **changes,
    }
    with pytest.raises(ArgumentError, match=message):
        op(*args.values())
