import ml_dtypes
import numpy as np
import pytest
import torch

from bitport.numerics import NUMBER_TYPES, NumberType, number_type
from tests.numerics.judges import JUDGES


@pytest.mark.parametrize("name", JUDGES)
def test_float_limits_are_those_of_the_judge(name: str) -> None:
    info, number = ml_dtypes.finfo(JUDGES[name]), NUMBER_TYPES[name]
    assert number.max == float(info.max)
    assert number.smallest == float(info.smallest_normal if name == "float8_e8m0" else info.smallest_subnormal)
    assert number.bits == info.bits
    assert number.mantissa_bits == info.nmant
    assert number.emax == np.floor(np.log2(float(info.max)))


@pytest.mark.parametrize("bits", range(2, 9))
def test_integer_limits(bits: int) -> None:
    number = number_type(f"int{bits}")
    assert (number.qmax, number.midpoint, number.max) == (2**bits - 1, 2 ** (bits - 1), 2 ** (bits - 1) - 1)
    assert 2**number.emax <= number.max < 2 ** (number.emax + 1)


def test_one_bit_is_plus_and_minus_a_half() -> None:
    number = number_type("int1")
    assert [code - number.midpoint for code in range(number.qmax + 1)] == [-0.5, 0.5]
    assert number.max == 0.5


def test_storage_is_torchs_dtype_for_eight_bit_floats_only() -> None:
    own = {name: number.storage for name, number in NUMBER_TYPES.items() if number.storage != torch.uint8}
    assert own == {
        "float8_e4m3": torch.float8_e4m3fn,
        "float8_e5m2": torch.float8_e5m2,
        "float8_e8m0": torch.float8_e8m0fnu,
    }
    for name, dtype in own.items():
        if name != "float8_e8m0":
            assert NUMBER_TYPES[name].max == torch.finfo(dtype).max


def test_every_type_is_named_in_the_error() -> None:
    with pytest.raises(ValueError, match="int9") as error:
        number_type("int9")
    assert all(name in str(error.value) for name in NUMBER_TYPES)
    assert number_type(NUMBER_TYPES["nf4"]) is NUMBER_TYPES["nf4"]


@pytest.mark.parametrize("table", [(-1.0, 0.0, 1.0), (-1.0, 1.0, 0.0, 0.0), ()])
def test_a_table_has_a_value_for_each_code_in_order(table: tuple[float, ...]) -> None:
    """Too short a one failed while a weight was read; encoding by thresholds took an unsorted one for sorted."""
    with pytest.raises(ValueError, match="ternary: codebook of 2 bits has a table of 4 values in ascending order"):
        NumberType("ternary", 2, "codebook", table=table)
    assert NumberType("ternary", 2, "codebook", table=(-1.0, 0.0, 0.0, 1.0)).max == 1
