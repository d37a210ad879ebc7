"""The float codecs against ml_dtypes, and the directed modes against a search in the sorted table of values."""

import ml_dtypes
import numpy as np
import pytest
import torch

from bitport.numerics import NumberType, Rounding, decode, encode, number_type
from bitport.numerics.floats import nearest_value
from bitport.numerics.rounding import ROUNDINGS
from tests.numerics.judges import JUDGES, NEW

SIGNED: dict[str | NumberType, type] = {
    **{name: judge for name, judge in JUDGES.items() if name != "float8_e8m0"},
    NEW: ml_dtypes.float8_e3m4,
}
E8M0 = JUDGES["float8_e8m0"]


def id_of(name: str | NumberType) -> str:
    return number_type(name).name


def has_nan(name: str | NumberType) -> bool:
    return number_type(name).specials != "none"


def all_bits(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)


def random_float32() -> torch.Tensor:
    """Random bit patterns, the same moved into the range of the small types, and float32 subnormals."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 300_000, dtype=np.uint64).astype(np.uint32)
    near = (bits & 0x81FFFFFF) | (rng.integers(56, 72, bits.size).astype(np.uint32) << 25)
    subnormal = bits[:20_000] & 0x807FFFFF
    return torch.from_numpy(np.concatenate([bits, near, subnormal]).view(np.float32))


def ties(name: str | NumberType) -> torch.Tensor:
    """Every value of the type, every midpoint, and the float32 neighbours of both; then beyond the largest."""
    values = np.sort(np.unique(decode(torch.arange(1 << number_type(name).bits, dtype=torch.uint8), name).numpy()))
    values = values[np.isfinite(values)]
    beyond = np.array([values[-1] + (values[-1] - values[-2]) * step for step in (0.5, 1, 1.5)])
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2, beyond, -beyond]).astype(np.float32)
    return torch.from_numpy(
        np.concatenate([points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))])
    )


INPUTS = {
    "bfloat16": lambda name: all_bits(torch.bfloat16),
    "float16": lambda name: all_bits(torch.float16),
    "float32": lambda name: random_float32(),
    "ties": ties,
}


def judge(x: torch.Tensor, name: str | NumberType, saturate: bool) -> np.ndarray:
    number, values = number_type(name), x.to(torch.float32).numpy()
    if saturate:
        values = np.clip(values, -number.max, number.max)
    with np.errstate(over="ignore", invalid="ignore"):  # narrowing is under test
        return values.astype(SIGNED[name]).view(np.uint8)


@pytest.mark.parametrize("name", [*SIGNED, "float8_e8m0"], ids=id_of)
def test_decode_all_codes(name: str | NumberType) -> None:
    codes = np.arange(1 << number_type(name).bits, dtype=np.uint8)
    expected = codes.view(SIGNED.get(name, E8M0)).astype(np.float32)
    value = decode(torch.from_numpy(codes), name).numpy()
    np.testing.assert_array_equal(value, expected)
    np.testing.assert_array_equal(np.signbit(value), np.signbit(expected))  # -0 differs from 0


@pytest.mark.parametrize("saturate", [True, False], ids=["saturate", "overflow"])
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("name", SIGNED, ids=id_of)
def test_encode_against_ml_dtypes(name: str | NumberType, inputs: str, saturate: bool) -> None:
    """NaN is compared separately: its payload is undefined. For types without NaN, ml_dtypes gives -0 and bitport code
    0."""
    x = INPUTS[inputs](name)
    codes, nan = encode(x, name, saturate=saturate), x.isnan()
    np.testing.assert_array_equal(codes[~nan].numpy(), judge(x, name, saturate)[~nan.numpy()])
    if has_nan(name):
        assert decode(codes[nan], name).isnan().all()
        assert torch.equal(codes[nan] >> 7 == 1, x[nan].signbit())
    else:
        assert not codes[nan].any()


@pytest.mark.parametrize("mode", ROUNDINGS)
@pytest.mark.parametrize("name", SIGNED, ids=id_of)
def test_nan_of_either_sign_and_any_payload(name: str | NumberType, mode: Rounding) -> None:
    """Processors differ in the sign of the NaN that they compute, so a type without NaN has one code for both."""
    x = torch.tensor([0x7F800001, 0x7FFFFFFF, -0x7FFFFF, -1], dtype=torch.int32).view(torch.float32)
    codes = encode(x, name, mode, saturate=False, generator=torch.Generator().manual_seed(0))
    assert decode(codes, name).isnan().all() if has_nan(name) else not codes.any()


@pytest.mark.parametrize("inputs", ["bfloat16", "float16", "float32"])
def test_e8m0_against_ml_dtypes(inputs: str) -> None:
    """ml_dtypes (and torch) round values between 2^-127 and 1.5 * 2^-127 up to 2^-126, though 2^-127 is nearer."""
    x = INPUTS[inputs]("float8_e8m0")
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.to(torch.float32).numpy().astype(E8M0).view(np.uint8)
    wrong = (x > 2.0**-127) & (x < 1.5 * 2.0**-127)
    expected[wrong.numpy()] = 0
    np.testing.assert_array_equal(encode(x, "float8_e8m0", saturate=False).numpy(), expected)


def test_e8m0_is_the_nearest_power_of_two() -> None:
    """In float64, x = m * 2^e with 1/2 <= m < 1, so the neighbours are 2^(e-1) and 2^e; halfway rounds up."""
    x = random_float32()
    x = x[(x >= 2.0**-127) & (x < 1.5 * 2.0**127)]
    mantissa, exponent = np.frexp(x.double().numpy())
    np.testing.assert_array_equal(encode(x, "float8_e8m0").numpy(), exponent - 1 + (mantissa >= 0.75) + 127)


def test_e8m0_saturates_at_both_ends() -> None:
    x = torch.tensor([0.0, -0.0, 2.0**-149, 2.0**-128, 1.7 * 2.0**127, float("inf"), -1.0, float("nan")])
    assert encode(x, "float8_e8m0").tolist() == [0, 0, 0, 0, 254, 254, 255, 255]


@pytest.mark.parametrize("name", ["float8_e4m3", "float8_e5m2"])
def test_integer_path_is_the_same_as_torchs_cast(name: str) -> None:
    """encode uses torch's cast where it can, and integer arithmetic without saturation. In range they must agree."""
    number = number_type(name)
    x = torch.cat([ties(name), random_float32(), all_bits(torch.bfloat16).float()])
    x = x[x.abs() <= number.max]
    assert torch.equal(encode(x, name), encode(x, name, saturate=False))


def expected_by_search(x: np.ndarray, name: str | NumberType, mode: str) -> np.ndarray:
    """Find the two neighbours of x in the sorted float64 table of values, then choose by the mode."""
    number = number_type(name)
    table = np.array([number.float_value(code) for code in range(number.max_code + 1)])
    table = np.concatenate([-table[:0:-1], table])
    clipped = np.clip(x.astype(np.float64), -number.max, number.max)
    low = table[np.searchsorted(table, clipped, side="right") - 1]
    high = table[np.searchsorted(table, clipped, side="left")]
    if mode == "floor":
        return low
    if mode == "ceil":
        return high
    if mode == "toward_zero":
        return np.where(clipped > 0, low, high)
    up = (clipped - low > high - clipped) | ((clipped - low == high - clipped) & (clipped > 0))
    return np.where(up, high, low)  # half_away


@pytest.mark.parametrize("mode", ["floor", "ceil", "toward_zero", "half_away"])
@pytest.mark.parametrize("name", SIGNED, ids=id_of)
def test_other_modes_against_a_search(name: str | NumberType, mode: Rounding) -> None:
    x = torch.cat([ties(name), random_float32()[::5]])
    x = x[x.isfinite()]
    value = decode(encode(x, name, rounding=mode), name).double().numpy()
    np.testing.assert_array_equal(value, expected_by_search(x.numpy(), name, mode))


@pytest.mark.parametrize("mode", ["floor", "ceil", "half_away"])
def test_other_modes_of_e8m0(mode: Rounding) -> None:
    x = torch.tensor([2.0**-127, 1.25 * 2.0**-127, 1.5 * 2.0**-127, 1.0, 1.25, 1.5, 1.75, 1.5 * 2.0**126])
    exponent = {
        "floor": [-127, -127, -127, 0, 0, 0, 0, 126],
        "ceil": [-127, -126, -126, 0, 1, 1, 1, 127],
        "half_away": [-127, -127, -126, 0, 0, 1, 1, 127],
    }[mode]
    assert (encode(x, "float8_e8m0", rounding=mode).int() - 127).tolist() == exponent


@pytest.mark.parametrize("name", [*SIGNED, "float8_e8m0"], ids=id_of)
def test_stochastic_is_unbiased(name: str | NumberType) -> None:
    """n draws of a value at the fraction p between neighbours: the mean count of "up" has deviation sqrt(p(1-p)/n)."""
    number, draws = number_type(name), 10_000
    low = torch.tensor([number.smallest if name == "float8_e8m0" else 0.0, 1.0, number.max / 4])
    low_code = encode(low, name, rounding="floor").int()
    low, high = decode(low_code.to(torch.uint8), name), decode((low_code + 1).to(torch.uint8), name)
    generator = torch.Generator().manual_seed(1)
    for p in (0.125, 0.5, 0.8125):
        x = (low + p * (high - low)).expand(draws, 3)
        codes = encode(x, name, rounding="stochastic", generator=generator).int()
        ups = codes - low_code
        assert set(ups.unique().tolist()) <= {0, 1}
        assert ((ups.double().mean(0) - p).abs() <= 5 * (p * (1 - p) / draws) ** 0.5).all()


def test_stochastic_of_a_tiny_value_goes_up_as_often_as_its_size() -> None:
    """2^-12 of the smallest fp4 step, where the shift far exceeds the width of the significand."""
    draws, p = 1 << 20, 2.0**-12
    x = torch.full((draws,), 0.5 * p)
    ups = encode(x, "float4_e2m1", rounding="stochastic", generator=torch.Generator().manual_seed(2)).double()
    assert set(ups.unique().tolist()) == {0.0, 1.0}
    assert abs(ups.mean().item() - p) <= 5 * (p * (1 - p) / draws) ** 0.5


def test_stochastic_from_given_bits_is_reproducible() -> None:
    x = torch.tensor([1.25, 1.25])  # between fp4's 1.0 and 1.5, halfway: the top random bit of 22 decides
    bits = torch.tensor([0, (1 << 22) - 1], dtype=torch.int32)
    assert decode(encode(x, "float4_e2m1", rounding="stochastic", generator=bits), "float4_e2m1").tolist() == [1.0, 1.5]


def test_wrong_input_is_named() -> None:
    with pytest.raises(TypeError, match="float64"):
        encode(torch.zeros(1, dtype=torch.float64), "float8_e4m3")
    with pytest.raises(ValueError, match="int4"):
        encode(torch.zeros(1), "int4")
    with pytest.raises(ValueError, match=r"half_up.*half_even"):
        encode(torch.zeros(1), "float8_e4m3", rounding="half_up")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="generator"):
        encode(torch.zeros(1), "float8_e4m3", rounding="stochastic")
    assert "stochastic" in ROUNDINGS


@pytest.mark.parametrize("name", SIGNED, ids=id_of)
def test_the_nearest_value_is_that_of_the_code(name: str | NumberType) -> None:
    number, x = number_type(name), torch.cat([random_float32(), ties(name)])
    x = x[~x.isnan()]
    assert torch.equal(nearest_value(x, number, torch.empty_like(x)), decode(encode(x, number), number))
    assert bool(nearest_value(torch.tensor([torch.nan]), number, torch.empty(1)).isnan())
