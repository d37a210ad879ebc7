import pytest
import torch

from bitport.numerics import ACTIVATIONS, dequantize, fake_quantize, quantize_rows, sqnr

# Least SQNR in dB of normal values, 4096 a row.
# int8     step = amax/127 with amax < 5.5 deviations, noise step^2/12: 20 log10(127 sqrt(12) / 5.5)
# fp8      e4m3 is off by at most 1/16 of each value above 2^-6, smaller ones are negligible: 20 log10(16)
#          e5m2 by at most 1/8: 20 log10(8)
# mxfp8    "floor" clips values up to 512 to 448, off by up to 1/8: 20 log10(8)
# mx/nvfp4 e2m1 is off by at most 1/4 of a value, or of the scale s where that is larger, and s is below half a
#          deviation (amax >= 4 s is about 2 deviations): error^2 <= (1 + 1/4)/16, 11.07 dB
LEAST = {
    "int8": 38.0,
    "int8-asym": 38.0,
    "int8-tensor": 38.0,
    "fp8": 24.0,
    "fp8-tensor": 24.0,
    "fp8-e5m2-tensor": 18.0,
    "fp8-128": 24.0,
    "mxfp8": 18.0,
    "mxfp4": 11.0,
    "nvfp4": 11.0,
}


def sample(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_value_is_that_of_the_stored_rows(name: str) -> None:
    x = sample(2, 12, 4096)
    q = quantize_rows(x, name)
    value = fake_quantize(x, name)
    assert value.shape == x.shape
    assert value.dtype == torch.float32
    assert torch.equal(value.reshape(24, 4096), dequantize(q, ACTIVATIONS[name], 24, 4096))
    assert sqnr(x, value) >= LEAST[name]


@pytest.mark.parametrize("name", ["int8", "int8-asym", "fp8", "fp8-128", "mxfp8", "mxfp4"])
def test_rows_are_independent(name: str) -> None:
    """A token's rounding must not depend on its neighbours in the batch; only the tensor scales may couple them."""
    x = sample(5, 200) * torch.logspace(-4, 4, 5)[:, None]
    assert torch.equal(fake_quantize(x, name), torch.stack([fake_quantize(row, name) for row in x]))


@pytest.mark.parametrize("name", ["int8-tensor", "fp8-tensor"])
def test_static_scale(name: str) -> None:
    x, scale = sample(3, 64), torch.tensor(0.25)
    number = ACTIVATIONS[name].number
    value = fake_quantize(x, name, scale)
    assert torch.equal(value.reshape(3, 64), dequantize(quantize_rows(x, name, scale), ACTIVATIONS[name], 3, 64))
    if name == "int8-tensor":
        assert torch.equal(value, (x / 0.25).round().clamp(-128, 127) * 0.25)
    else:
        assert torch.equal(value, (x / 0.25).clamp(-number.max, number.max).to(torch.float8_e4m3fn).float() * 0.25)
    assert fake_quantize(x[:0], name, scale).shape == (0, 64)


def test_static_global_scale() -> None:
    x = sample(3, 64)
    own = quantize_rows(x, "nvfp4").scale2
    assert own is not None
    assert torch.equal(fake_quantize(x, "nvfp4", own.reshape(1)), fake_quantize(x, "nvfp4"))
    assert not torch.equal(fake_quantize(x, "nvfp4", own * 1.37), fake_quantize(x, "nvfp4"))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_shapes(name: str) -> None:
    for shape in ((40,), (1, 40), (2, 3, 40), (0, 40), (2, 0, 40), (3, 0)):
        assert fake_quantize(sample(*shape), name).shape == shape


def test_wrong_input_is_named() -> None:
    x = sample(2, 32)
    with pytest.raises(ValueError, match=r"int7.*mxfp8"):
        fake_quantize(x, "int7")
    with pytest.raises(ValueError, match=r"'int8' scales each token.*int8-tensor"):
        fake_quantize(x, "int8", torch.ones(1))
    with pytest.raises(ValueError, match=r"one float32 number.*\(2, 1\)"):
        quantize_rows(x, "int8-tensor", torch.ones(2, 1))
    with pytest.raises(ValueError, match="float64"):
        quantize_rows(x, "int8-tensor", torch.ones((), dtype=torch.float64))
