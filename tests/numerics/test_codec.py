from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import torch

from bitport.numerics import (
    NUMBER_TYPES,
    Format,
    Quantized,
    Rounding,
    decode,
    dequantize,
    encode_codebook,
    expand,
    from_storage,
    quantize,
    quantize_dequantize,
    sqnr,
    unpack_bits,
)

INTS = [f"int{bits}" for bits in range(1, 9)]
BLOCKS = [(0, 0), (1, 0), (1, 32), (1, 7), (16, 48), (3, 5), (1, 1)]
SHAPE = (2, 19, 50)  # short blocks at both edges


def sample(shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return (x + 0.3).to(dtype)  # off centre, so that a zero point matters


def float64_value(q: Quantized, fmt: Format, n: int, k: int) -> torch.Tensor:
    """The value of the stored parts by definition, in float64."""
    codes = unpack_bits(q.data, fmt.number.bits, k).double()
    zero = fmt.number.midpoint if q.zero is None else expand(q.zero.double(), fmt.block, n, k)
    return (codes - zero) * expand(q.scale.double(), fmt.block, n, k)


@pytest.mark.parametrize("scale", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("zero", ["none", "int", "float"])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("dtype", INTS)
def test_integers_within_half_a_step(dtype: str, block: tuple[int, int], zero: str, scale: str) -> None:
    """|x - value| <= scale/2 from rounding the code. At the ends of the range, clipping adds the error of the stored
    scale times the steps: half an ulp, eps/2 of the scale or half the smallest value of its dtype; a float zero point
    of that dtype adds as much again. Float32 arithmetic (division, sum, difference, product) adds four half-eps of
    numbers up to `steps`."""
    fmt = Format(dtype=dtype, block=block, zero=zero, scale=scale)
    x = sample()
    q = quantize(x, fmt)
    steps, limits = fmt.number.qmax, torch.finfo(getattr(torch, scale))
    stored = expand(q.scale.double(), block, *SHAPE[1:])
    half_ulp = limits.eps / 2 * stored.clamp(min=limits.smallest_normal)
    bound = stored * (0.5 + steps * 4 * 2.0**-24) + steps * half_ulp * (2 if zero == "float" else 1)
    value = dequantize(q, fmt, *SHAPE[1:])
    assert ((x - value).abs().double() <= bound).all()
    exact = float64_value(q, fmt, *SHAPE[1:])
    assert ((value - exact).abs() <= 2.0**-23 * exact.abs() + 2.0**-23 * steps * q.scale.double().amax()).all()


@pytest.mark.parametrize("zero", ["none", "int"])
@pytest.mark.parametrize("bits", range(2, 9))
def test_sqnr_of_uniform_noise(bits: int, zero: str) -> None:
    """Power 1/3 against step^2/12 with step = 2/levels: 20 log10(levels), about 6.02 dB per bit. With 300,000 samples
    the noise power is known to sqrt(4/5/n) = 0.16 %, so 5 deviations are 0.04 dB."""
    x = torch.rand(1, 300_000, generator=torch.Generator().manual_seed(0)) * 2 - 1
    fmt = Format(dtype=f"int{bits}", zero=zero)
    levels = 2 * fmt.number.max if zero == "none" else fmt.number.qmax
    assert sqnr(x, quantize_dequantize(x, fmt)).item() == pytest.approx(20 * np.log10(levels), abs=0.04)


@pytest.mark.parametrize("block", [(0, 0), (1, 0), (1, 32), (4, 16)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "judge"),
    [
        ("float8_e4m3", ml_dtypes.float8_e4m3fn),
        ("float8_e5m2", ml_dtypes.float8_e5m2),
        ("float6_e2m3", ml_dtypes.float6_e2m3fn),
        ("float6_e3m2", ml_dtypes.float6_e3m2fn),
        ("float4_e2m1", ml_dtypes.float4_e2m1fn),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("scale", ["float32", "e8m0"])
def test_floats_against_numpy(dtype: str, judge: type, block: tuple[int, int], scale: str) -> None:
    fmt, x = Format(dtype=dtype, block=block, scale=scale), sample()
    q = quantize(x, fmt)
    factor = expand(q.scale.float(), block, *SHAPE[1:]).numpy()
    limit = np.float32(fmt.number.max)
    codes = np.clip(x.numpy() / factor, -limit, limit).astype(judge)
    stored = from_storage(q.data, fmt.number, SHAPE[-1])
    np.testing.assert_array_equal(stored.numpy(), codes.view(np.uint8))
    np.testing.assert_array_equal(dequantize(q, fmt, *SHAPE[1:]).numpy(), codes.astype(np.float32) * factor)


def test_nvfp4_against_numpy() -> None:
    fmt, x = Format(dtype="float4_e2m1", block=(1, 16), scale="e4m3", global_scale=True), sample()
    q = quantize(x, fmt)
    assert q.scale2 is not None
    assert (q.scale.dtype, q.scale2.dtype, q.scale2.shape) == (torch.float8_e4m3fn, torch.float32, (2, 1, 1))
    factor = expand(decode(q.scale.view(torch.uint8), "float8_e4m3") * q.scale2, (1, 16), *SHAPE[1:]).numpy()
    codes = np.clip(x.numpy() / factor, np.float32(-6), np.float32(6)).astype(ml_dtypes.float4_e2m1fn)
    np.testing.assert_array_equal(unpack_bits(q.data, 4, 50).numpy(), codes.view(np.uint8))
    np.testing.assert_array_equal(dequantize(q, fmt, *SHAPE[1:]).numpy(), codes.astype(np.float32) * factor)


def test_nf4_against_the_codebook() -> None:
    fmt, x = Format(dtype="nf4", block=(1, 16)), sample()
    q = quantize(x, fmt)
    table = fmt.number.table
    scaled = x / expand(q.scale, (1, 16), *SHAPE[1:])
    assert torch.equal(unpack_bits(q.data, 4, 50), encode_codebook(scaled, table))
    gap = max(b - a for a, b in pairwise(table)) / 2 + 2.0**-23
    value = dequantize(q, fmt, *SHAPE[1:])
    assert ((x - value).abs() <= gap * expand(q.scale, (1, 16), *SHAPE[1:])).all()
    with pytest.raises(ValueError, match="nearest entry only"):
        quantize(x, fmt, rounding="floor")


@pytest.mark.parametrize("dtype", [name for name in NUMBER_TYPES if name != "float8_e8m0"])
def test_quantizing_its_own_values_changes_nothing(dtype: str) -> None:
    """With the scale given, dequantized values are exactly representable: a second pass gives the same codes."""
    fmt = Format(dtype=dtype, block=(1, 16), scale="bfloat16")
    q = quantize(sample(), fmt)
    again = quantize(dequantize(q, fmt, *SHAPE[1:]), fmt, scale=q.scale)
    assert torch.equal(q.data.view(torch.uint8), again.data.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_inputs_are_computed_in_float32(dtype: torch.dtype) -> None:
    fmt, x = Format(dtype="int8", block=(1, 32)), sample(dtype=dtype)
    half, single = quantize(x, fmt), quantize(x.float(), fmt)
    assert torch.equal(half.data, single.data)
    assert torch.equal(half.scale, single.scale)
    value = dequantize(half, fmt, *SHAPE[1:], dtype=dtype)
    assert torch.equal(value, dequantize(half, fmt, *SHAPE[1:]).to(dtype))


def test_given_scale_and_zero_are_used_and_clip() -> None:
    fmt = Format(dtype="int4", zero="int")
    x = torch.tensor([[-9.0, -1.0, 0.4, 0.6, 50.0]])
    scale, zero = torch.ones(1, 1), torch.tensor([[3]], dtype=torch.uint8)
    q = quantize(x, fmt, scale=scale, zero=zero)
    assert q.scale is scale
    assert q.zero is zero
    assert dequantize(q, fmt, 1, 5).tolist() == [[-3.0, -1.0, 0.0, 1.0, 12.0]]
    signed = Format(dtype="int4")
    assert dequantize(quantize(x, signed, scale=scale), signed, 1, 5).tolist() == [[-8.0, -1.0, 0.0, 1.0, 7.0]]
    nan = quantize(torch.tensor([[float("nan"), float("inf"), -float("inf")]]), signed, scale=scale)
    assert dequantize(nan, signed, 1, 3).tolist() == [[0.0, 7.0, -8.0]]


@pytest.mark.parametrize("scale", ["input", "e8m0"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["float8_e4m3", "float8_e5m2"])
def test_a_block_without_a_scale_has_the_nan_without_a_sign(name: str, dtype: torch.dtype, scale: str) -> None:
    fmt, nan = Format(dtype=name, block=(1, 4), scale=scale), float("nan")
    for number in (nan, -nan, float("inf"), -float("inf")):
        x = torch.tensor([[number, 1.0, -2.0, 0.0, 1.0, -2.0, 0.0, 3.0]], dtype=dtype)
        codes = quantize(x, fmt).data.view(torch.uint8)
        assert codes[0, :4].tolist() == [NUMBER_TYPES[name].nan_code] * 4
        assert NUMBER_TYPES[name].nan_code not in codes[0, 4:] & 127


def test_float_zero_point_is_added_before_rounding() -> None:
    fmt = Format(dtype="int2", zero="float")
    x = torch.tensor([[0.0, 0.2, 1.0]])
    q = quantize(x, fmt, scale=torch.ones(1, 1), zero=torch.tensor([[0.4]]))
    assert unpack_bits(q.data, 2, 3).tolist() == [[0, 1, 1]]
    assert dequantize(q, fmt, 1, 3)[0].tolist() == pytest.approx([-0.4, 0.6, 0.6])


@pytest.mark.parametrize("mode", ["floor", "ceil", "toward_zero", "half_away"])
def test_rounding_modes_reach_the_codes(mode: Rounding) -> None:
    x = torch.tensor([[-2.5, -1.25, 0.5, 1.75, 2.5]])
    expected = {
        "floor": [-3, -2, 0, 1, 2],
        "ceil": [-2, -1, 1, 2, 3],
        "toward_zero": [-2, -1, 0, 1, 2],
        "half_away": [-3, -1, 1, 2, 3],
    }[mode]
    for fmt in (Format(dtype="int4"), Format(dtype="int4", zero="int")):
        zero = torch.tensor([[8]], dtype=torch.uint8) if fmt.zero == "int" else None
        q = quantize(x, fmt, scale=torch.ones(1, 1), zero=zero, rounding=mode)
        assert dequantize(q, fmt, 1, 5).tolist() == [expected]
    fmt = Format(dtype="float4_e2m1")
    points = {"floor": [-3, -1.5, 0.5, 1.5, 2], "ceil": [-2, -1, 0.5, 2, 3], "toward_zero": [-2, -1, 0.5, 1.5, 2]}
    q = quantize(x, fmt, scale=torch.ones(1, 1), rounding=mode)
    assert dequantize(q, fmt, 1, 5).tolist() == [points.get(mode, [-3, -1.5, 0.5, 2, 3])]


@pytest.mark.parametrize("dtype", ["int4", "int1", "float4_e2m1", "float8_e4m3"])
def test_stochastic_rounding_is_unbiased(dtype: str) -> None:
    """The mean of n rounded copies: each is off by at most a step, so its deviation is at most half a step."""
    n, fmt = 4000, Format(dtype=dtype, block=(1, 5))  # 16 elements: short blocks carry their random bits too
    x = sample((1, 16))
    q = quantize(x.expand(n, 16), fmt, rounding="stochastic", generator=torch.Generator().manual_seed(0))
    value = dequantize(q, fmt, n, 16).double()
    floor = dequantize(quantize(x, fmt, rounding="floor"), fmt, 1, 16).double()
    ceil = dequantize(quantize(x, fmt, rounding="ceil"), fmt, 1, 16).double()
    assert ((value == floor) | (value == ceil)).all()
    rounding = 4 * 2.0**-24 * x.abs().max()
    assert ((value.mean(0) - x[0]).abs() <= 5 * (ceil - floor)[0] / 2 / n**0.5 + rounding).all()


def test_random_bits_can_be_given() -> None:
    fmt, x = Format(dtype="int4", block=(1, 7)), sample((3, 20))
    bits = torch.randint(0, 1 << 30, x.shape, dtype=torch.int32, generator=torch.Generator().manual_seed(5))
    drawn = quantize(x, fmt, rounding="stochastic", generator=torch.Generator().manual_seed(5))
    assert torch.equal(quantize(x, fmt, rounding="stochastic", generator=bits).data, drawn.data)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (1, 1), (1, 9), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("block", [(0, 0), (1, 0), (1, 4), (2, 2)], ids=str)
@pytest.mark.parametrize(
    "fmt",
    [
        Format(dtype="int4"),
        Format(dtype="int3", zero="int"),
        Format(dtype="nf4"),
        Format(dtype="float4_e2m1", scale="e4m3", global_scale=True),
        Format(dtype="float8_e4m3", scale="e8m0"),
    ],
    ids=lambda fmt: fmt.dtype,
)
def test_empty_and_single(fmt: Format, block: tuple[int, int], shape: tuple[int, ...]) -> None:
    fmt = Format(**{**vars(fmt), "block": block})
    x = torch.ones(shape)
    q = quantize(x, fmt)
    assert q.scale.shape[-2:] == fmt.scale_shape(*shape[-2:])
    # ones are the largest of their block, so they survive up to float32 rounding; e8m0 holds them exactly
    n, k = shape[-2:]
    torch.testing.assert_close(dequantize(q, fmt, n, k), x, rtol=2.0**-22, atol=0)


def test_no_gradient_flows() -> None:
    q = quantize(sample().requires_grad_(), Format(dtype="int4", zero="float"))
    assert not any(part.requires_grad for part in q if part is not None)


def test_packed_and_unpacked_paths_agree() -> None:
    for fmt in (Format(dtype="int3", block=(1, 7), zero="float"), Format(dtype="float6_e3m2", scale="e8m0")):
        x = sample()
        assert torch.equal(quantize_dequantize(x, fmt), dequantize(quantize(x, fmt), fmt, *SHAPE[1:]))


def test_wrong_parts_are_named() -> None:
    x, scale, affine = sample((4, 32)), torch.ones(4, 1), Format(dtype="int4", zero="int")
    nvfp4 = Format(dtype="float4_e2m1", block=(1, 16), scale="e4m3", global_scale=True)
    with pytest.raises(ValueError, match="needs zero="):
        quantize(x, affine, scale=scale)
    with pytest.raises(ValueError, match="give scale="):
        quantize(x, affine, zero=scale)
    with pytest.raises(ValueError, match="zero must be"):
        quantize(x, affine, scale=scale, zero=scale)
    with pytest.raises(ValueError, match=r"last axes \(4, 1\), got torch.float32 of shape \(1, 4\)"):
        quantize(x, Format(dtype="int4"), scale=scale.T)
    with pytest.raises(ValueError, match="has no zero"):
        quantize(x, Format(dtype="int4"), scale=scale, zero=scale)
    with pytest.raises(ValueError, match="needs scale2="):
        quantize(x, nvfp4, scale=torch.ones(4, 2).to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match="has no scale2"):
        quantize(x, Format(dtype="int4"), scale2=torch.ones(1, 1))
    with pytest.raises(TypeError, match="float64"):
        quantize(x.double(), Format(dtype="int4"))
    with pytest.raises(TypeError, match="float64"):
        quantize(x.double(), Format(dtype="int4"), scale=scale)
    with pytest.raises(ValueError, match="4 rows, asked for n=5"):
        dequantize(quantize(x, affine), affine, 5, 32)
