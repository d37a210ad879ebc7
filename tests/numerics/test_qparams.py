"""Scales against exact rational arithmetic, the cases of the MX specification by hand, and the edge cases."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from bitport.numerics import Format, choose_qparams, dequantize, number_type, power_of_two_scale, quantize

INF, NAN = float("inf"), float("nan")
MX_TYPES = ("float8_e4m3", "float8_e5m2", "float6_e2m3", "float6_e3m2", "float4_e2m1", "int8", "int2", "nf4")
NVFP4 = Format(dtype="float4_e2m1", block=(1, 16), scale="e4m3", global_scale=True)


def exponents(amax: torch.Tensor, dtype: str, rule: str) -> list[int]:
    fmt = Format(dtype=dtype, block=(1, 32), scale="e8m0", scale_rule=rule)
    return (power_of_two_scale(amax, fmt).view(torch.uint8).int() - 127).tolist()


def floor_log2(value: Fraction) -> int:
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent - (Fraction(2) ** exponent > value)


def ceil_log2(value: Fraction) -> int:
    return floor_log2(value) + (Fraction(2) ** floor_log2(value) != value)


def exact_exponent(amax: float, dtype: str, rule: str) -> int:
    number, value = number_type(dtype), Fraction(amax)
    if rule == "rceil":
        exponent = ceil_log2(value / Fraction(number.max))
    elif rule == "ceil":
        exponent = ceil_log2(value) - number.emax
    else:
        if rule == "even":
            step = Fraction(2) ** (floor_log2(value) - number.mantissa_bits)
            value = round(value / step) * step  # Fraction rounds half to even
        exponent = floor_log2(value) - number.emax
    return min(max(exponent, -127), 127 - number.emax)


@pytest.mark.parametrize("rule", ["floor", "ceil", "even", "rceil"])
@pytest.mark.parametrize("dtype", MX_TYPES)
def test_power_of_two_at_all_exponents(dtype: str, rule: str) -> None:
    if (dtype, rule) == ("nf4", "even"):
        return  # not a valid format: see test_format
    one = np.arange(1, 255, dtype=np.uint32) << 23
    largest = number_type(dtype).max / 2.0 ** number_type(dtype).emax
    fractions = {0, 1, 0x400000, 0x600000, 0x700000, 0x780000, 0x77FFFF, 0x7FFFFF, int((largest - 1) * 2**23)}
    bits = [one + fraction for fraction in sorted(fractions)]
    bits += [one + int((largest - 1) * 2**23) + 1] if largest < 2 - 2**-23 else []
    subnormal = np.array([1, 2, 0x3FFFFF, 0x400000, 0x400001, 0x600000, 0x7FFFFF], dtype=np.uint32)
    amax = torch.from_numpy(np.concatenate([*bits, subnormal]).view(np.float32))
    assert exponents(amax, dtype, rule) == [exact_exponent(value, dtype, rule) for value in amax.tolist()]


@pytest.mark.parametrize(
    ("dtype", "rule", "cases"),
    [
        ("float8_e4m3", "floor", {256: 0, 448: 0, 511: 0, 512: 1}),
        ("float8_e4m3", "ceil", {256: 0, 257: 1, 448: 1, 512: 1, 513: 2}),
        ("float8_e4m3", "even", {256: 0, 448: 0, 495.9: 0, 496: 1, 512: 1}),
        ("float8_e4m3", "rceil", {224: -1, 225: 0, 448: 0, 448.1: 1, 512: 1, 896: 1}),
        ("float4_e2m1", "floor", {4: 0, 6: 0, 7.9: 0, 8: 1}),
        ("float4_e2m1", "ceil", {4: 0, 4.1: 1, 8: 1}),
        ("float4_e2m1", "even", {6: 0, 6.9: 0, 7: 1, 8: 1}),
        ("float4_e2m1", "rceil", {3: -1, 3.1: 0, 6: 0, 6.1: 1}),
        ("int8", "floor", {1: -6, 127: 0, 128: 1}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_rules_by_hand(dtype: str, rule: str, cases: dict[float, int]) -> None:
    assert exponents(torch.tensor(list(map(float, cases))), dtype, rule) == list(cases.values())


@pytest.mark.parametrize("rule", ["floor", "ceil", "even", "rceil"])
def test_power_of_two_ends(rule: str) -> None:
    assert exponents(torch.tensor([0.0, 2.0**-149, INF, NAN]), "float4_e2m1", rule) == [-127, -127, 128, 128]


@pytest.mark.parametrize("scale", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["int1", "int2", "int4", "int8", "float8_e4m3", "float4_e2m1", "nf4"])
def test_symmetric_scale_is_correctly_rounded(dtype: str, scale: str) -> None:
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 40)[:, None]
    chosen, zero, scale2 = choose_qparams(x, Format(dtype=dtype, block=(1, 16), scale=scale))
    exact = x.double().abs().reshape(40, 4, 16).amax(-1) / number_type(dtype).max
    storage = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[scale]
    expected = exact.numpy().astype(np.float32).astype(storage).astype(np.float32)
    assert chosen.dtype == getattr(torch, scale)
    np.testing.assert_array_equal(chosen.float().numpy(), expected)
    assert zero is None
    assert scale2 is None


def test_input_scale_follows_the_tensor() -> None:
    fmt = Format(dtype="int4", block=(1, 16), scale="input", zero="float")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        scale, zero, _ = choose_qparams(torch.randn(2, 32).to(dtype), fmt)
        assert scale.dtype == dtype
        assert zero is not None
        assert zero.dtype == dtype


def test_zero_point_range_includes_zero() -> None:
    x = torch.tensor([[1.0, 3.0], [-3.0, -1.0], [-1.0, 2.0], [-2.0, 1.0], [0.0, 0.0]])
    scale, zero, _ = choose_qparams(x, Format(dtype="int2", zero="int"))
    assert scale.flatten().tolist() == [1.0, 1.0, 1.0, 1.0, 1.0]
    assert zero is not None
    assert zero.dtype == torch.uint8
    assert zero.flatten().tolist() == [0, 3, 1, 2, 2]
    scale, zero, _ = choose_qparams(torch.tensor([[-1.0, 2.5]]), Format(dtype="int2", zero="float"))
    assert zero is not None
    assert zero.item() == pytest.approx(1 / (3.5 / 3), rel=2**-22)


def test_two_level_scale_against_numpy() -> None:
    x = torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(0))
    scale, _, scale2 = choose_qparams(x, NVFP4)
    assert scale2 is not None
    blocks = np.abs(x.numpy()).reshape(3, 8, 4, 16).max(-1)
    top = blocks.max((1, 2), keepdims=True) / np.float32(448 * 6)
    np.testing.assert_array_equal(scale2.numpy(), top)
    expected = (blocks / np.float32(6) / top).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(scale.view(torch.uint8).numpy(), expected.view(np.uint8))
    assert scale.float().amax((-2, -1)).tolist() == [448.0] * 3


def test_given_global_scale_is_kept() -> None:
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    own = torch.full((1, 1), 1 / 64)
    scale, _, scale2 = choose_qparams(x, NVFP4, own)
    assert scale2 is own
    expected = (x.abs().reshape(2, 2, 16).amax(-1) / 6 / (1 / 64)).numpy().astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(scale.float().numpy(), expected.astype(np.float32))


ENDS = [
    Format(dtype="int8", block=(1, 4)),
    Format(dtype="int8", block=(1, 4), scale="input"),
    Format(dtype="int4", block=(1, 4), zero="int"),
    Format(dtype="int8", block=(1, 4), zero="int", scale="input"),
    Format(dtype="int4", block=(1, 4), zero="float", scale="input"),
    Format(dtype="int1", block=(1, 4)),
    Format(dtype="int1", block=(1, 4), zero="int"),
    Format(dtype="nf4", block=(1, 4)),
    Format(dtype="float8_e4m3", block=(1, 4)),
    Format(dtype="float8_e5m2", block=(1, 4), scale="input"),
    Format(dtype="float4_e2m1", block=(1, 4), scale="e8m0"),
    Format(dtype="float8_e4m3", block=(1, 4), scale="e8m0", scale_rule="rceil"),
    Format(dtype="float8_e4m3", block=(1, 4), scale="e8m0", scale_rule="ceil"),
    Format(dtype="float4_e2m1", block=(1, 4), scale="e4m3", global_scale=True),
    Format(dtype="int8", block=(1, 4), scale="e4m3", global_scale=True),
    Format(dtype="int1", block=(1, 4), scale="e4m3", global_scale=True),
    Format(dtype="float4_e2m1", block=(1, 4), scale="e4m3"),
]
fmt_ids = pytest.mark.parametrize("fmt", ENDS, ids=lambda f: f"{f.dtype}-{f.zero}-{f.scale}-{f.scale_rule}")


@fmt_ids
@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=str)
def test_a_bad_block_is_loud_and_alone(fmt: Format, bad: float) -> None:
    good = torch.randn(2, 12, generator=torch.Generator().manual_seed(0)).bfloat16()
    good[0, 4:8] = 0.001  # so that the bad block holds neither the largest nor the smallest value
    x = good.clone()
    x[0, 5] = bad
    value = dequantize(quantize(x, fmt), fmt, 2, 12)
    expected = dequantize(quantize(good, fmt), fmt, 2, 12)
    expected[0, 4:8] = NAN
    assert torch.equal(value.isnan(), expected.isnan())
    assert torch.equal(value.nan_to_num(), expected.nan_to_num())


@fmt_ids
def test_zeros_are_exactly_zero(fmt: Format) -> None:
    x = torch.randn(2, 12, generator=torch.Generator().manual_seed(0))
    x[:, 4:8] = 0
    q = quantize(x, fmt)
    assert not dequantize(q, fmt, 2, 12)[:, 4:8].any()
    expected = 2.0**-127 if fmt.scale == "e8m0" else 0.0 if fmt.dtype == "int1" and fmt.zero == "none" else 1.0
    assert q.scale[:, 1].float().tolist() == [expected] * 2
    assert q.zero is None or q.zero[:, 1].float().tolist() == [2.0 ** (fmt.number.bits - 1)] * 2
    assert not dequantize(quantize(torch.zeros(2, 12), fmt), fmt, 2, 12).any()


@fmt_ids
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_smallest_values_do_not_lose_their_scale(fmt: Format, dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    x = torch.full((1, 4), tiny, dtype=dtype)
    q = quantize(x, fmt)
    value = dequantize(q, fmt, 1, 4)
    assert q.scale.float().item() > 0
    assert value.isfinite().all()
    if fmt.scale in ("float32", "input"):
        assert ((value - x.float()).abs() <= tiny / 2).all()


@fmt_ids
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ends", [(1, 1), (-1, -1), (-1, 1), (-0.9, 1), (-1, 0.3)], ids=str)
def test_the_largest_values_stay_finite(fmt: Format, dtype: torch.dtype, ends: tuple[float, float]) -> None:
    """Finite in the input's own dtype too, except with e8m0 scales: a power of two cannot end just below float16's
    65504."""
    largest = torch.finfo(dtype).max
    x = (torch.tensor([[ends[0], ends[1], 0.5, 0.0]]).double() * largest).to(dtype)
    q = quantize(x, fmt)
    value = dequantize(q, fmt, 1, 4)
    assert value.isfinite().all()
    if fmt.scale != "e8m0":
        assert dequantize(q, fmt, 1, 4, dtype).isfinite().all()
    coarse = fmt.dtype == "int1" or (fmt.scale == "e4m3" and not fmt.global_scale)
    if not coarse:  # one bit and an e4m3 scale alone (at most 448) cannot hold the value
        assert (value[0, :2].sign() == x[0, :2].sign().float()).all()
        assert ((value[0, :2] / largest - torch.tensor(ends)).abs() < 0.26).all()


def test_a_scale_dtype_that_is_too_small_clips() -> None:
    fmt = Format(dtype="int8", scale="float16")
    q = quantize(torch.tensor([[1e30, 1.0]]), fmt)
    assert q.scale.item() == 65504
    assert dequantize(q, fmt, 1, 2).tolist() == [[127 * 65504.0, 0.0]]
