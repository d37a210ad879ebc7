"""The reference itself, against ml_dtypes and against bits taken from Python's big integers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from bitport.numerics import NUMBER_TYPES, Quantized, number_type
from bitport.numerics.codebooks import NF4
from bitport.ops.reference import code_value, value_of
from tests.numerics.judges import JUDGES


@pytest.mark.parametrize("name", JUDGES)
def test_every_code_of_a_float_type(name: str) -> None:
    number = number_type(name)
    codes = np.arange(1 << number.bits, dtype=np.uint8)
    judged = codes.view(JUDGES[name]).astype(np.float64)
    ours = np.array([code_value(number, int(code)) for code in codes])
    np.testing.assert_array_equal(ours, judged)
    assert np.array_equal(np.signbit(ours[~np.isnan(ours)]), np.signbit(judged[~np.isnan(judged)]))


def test_every_float_type_has_a_judge() -> None:
    assert {name for name, number in NUMBER_TYPES.items() if number.kind == "float"} == set(JUDGES)


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_of_an_integer_type(bits: int) -> None:
    values = [code_value(number_type(f"int{bits}"), code) for code in range(1 << bits)]
    middle = 0.5 if bits == 1 else 2 ** (bits - 1)
    assert values == [code - middle for code in range(1 << bits)]


def test_codes_of_the_codebook() -> None:
    assert [code_value(number_type("nf4"), code) for code in range(16)] == list(NF4)
    assert math.isnan(code_value(number_type("nf4"), 16))


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_are_cut_from_the_row_as_one_little_endian_number(bits: int) -> None:
    n, k, block = 3, 37, 8
    data = torch.randint(0, 256, (n, (k * bits + 7) // 8), dtype=torch.uint8)
    scale = torch.rand(n, -(-k // block))
    zero = torch.randint(0, 1 << bits, scale.shape, dtype=torch.uint8)
    value = value_of(Quantized(data, scale, zero), f"int{bits}", n, k, 1, block)
    for row in range(n):
        stream = int.from_bytes(bytes(data[row].tolist()), "little")
        for column in range(k):
            code = stream >> (column * bits) & ((1 << bits) - 1)
            group = column // block
            assert value[row, column].item() == (code - int(zero[row, group])) * float(scale[row, group])


def test_scales_of_blocks_and_of_the_whole() -> None:
    data = torch.full((5, 6), 129, dtype=torch.uint8)  # int8 code 129 = value 1
    scale = torch.arange(1.0, 7).reshape(3, 2)
    value = value_of(Quantized(data, scale), "int8", 5, 6, 2, 4)
    assert value.tolist() == [[1.0] * 4 + [2.0] * 2] * 2 + [[3.0] * 4 + [4.0] * 2] * 2 + [[5.0] * 4 + [6.0] * 2]


def test_scales_kept_as_bytes() -> None:
    data = torch.tensor([[0x22, 0x22]], dtype=torch.uint8)  # fp4 code 2 = value 1
    e8m0 = torch.tensor([[126, 129]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert value_of(Quantized(data, e8m0), "float4_e2m1", 1, 4, 1, 2).tolist() == [[0.5, 0.5, 4.0, 4.0]]
    e4m3 = torch.tensor([[1.5, 0.25]]).to(torch.float8_e4m3fn)
    second = torch.tensor([[3.0]])
    assert value_of(Quantized(data, e4m3, None, second), "float4_e2m1", 1, 4, 1, 2).tolist() == [[4.5, 4.5, 0.75, 0.75]]
