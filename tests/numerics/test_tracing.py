"""The same functions under torch.compile, torch.export and on meta tensors."""

import pytest
import torch
from torch import Tensor

from bitport.numerics import ACTIVATIONS, Format, Quantized, dequantize, quantize, quantize_rows
from bitport.numerics.activations import fake_quantize
from bitport.numerics.codec import dequantize_codes, quantize_codes

FORMATS = {
    **ACTIVATIONS,
    "int4-group": Format(dtype="int4", block=(1, 32), scale="input"),
    "int3-float-zero": Format(dtype="int3", block=(1, 7), zero="float", scale="bfloat16"),
    "fp8-block": Format(dtype="float8_e4m3", block=(4, 16)),
    "mxfp6": Format(dtype="float6_e2m3", block=(1, 32), scale="e8m0", scale_rule="rceil"),
    "nf4": Format(dtype="nf4", block=(1, 64)),
}
formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)


def sample(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def same(first: Quantized, second: Quantized) -> bool:
    pairs = zip(first, second, strict=True)
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a is not None and b is not None else a is b
        for a, b in pairs
    )


@formats
def test_meta_tensors_have_the_real_shapes(fmt: Format) -> None:
    x = sample(2, 9, 50)
    real, meta = quantize(x, fmt), quantize(x.to("meta"), fmt)
    for a, b in zip(real, meta, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
    assert dequantize(meta, fmt, 9, 50).shape == (2, 9, 50)


@formats
def test_compiled_whole_and_equal(fmt: Format) -> None:
    def both(x: Tensor) -> tuple[Quantized, Tensor]:
        q = quantize(x, fmt)
        return q, dequantize(q, fmt, *x.shape[-2:])

    torch._dynamo.reset()
    x = sample(9, 50)
    q, value = torch.compile(both, fullgraph=True, backend="aot_eager")(x)
    assert same(q, quantize(x, fmt))
    assert torch.equal(value, dequantize(quantize(x, fmt), fmt, 9, 50))


def test_compiled_stochastic_rounding_with_given_bits() -> None:
    def rounded(x: Tensor, bits: Tensor) -> Tensor:
        return quantize(x, FORMATS["mxfp4"], rounding="stochastic", generator=bits).data

    torch._dynamo.reset()
    x = sample(4, 64)
    bits = torch.randint(0, 1 << 30, x.shape, dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.compile(rounded, fullgraph=True, backend="aot_eager")(x, bits), rounded(x, bits))


@pytest.mark.parametrize("name", ["int8", "fp8-128", "mxfp4", "nvfp4"])
def test_exported_with_any_number_of_rows(name: str) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return fake_quantize(x, name)

    rows = {"x": {0: torch.export.Dim("rows", min=2, max=1000)}}
    program = torch.export.export(Module(), (sample(8, 200),), dynamic_shapes=rows).module()
    for count in (2, 8, 33):
        x = sample(count, 200)
        assert torch.equal(program(x), fake_quantize(x, name))


@pytest.mark.slow
def test_compiled_by_inductor_too() -> None:
    """An e8m0 format through the real compiler: its C++ has no e8m0 buffers, so a view of one would not compile."""
    torch._dynamo.reset()
    x = sample(4, 64)
    compiled = torch.compile(lambda x: quantize_rows(x, "mxfp4"), fullgraph=True)
    assert same(compiled(x), quantize_rows(x, "mxfp4"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int4-group", "mxfp8", "fp8-128", "nvfp4"])
@pytest.mark.parametrize("columns", [48, 200, 300])
def test_inductor_fills_the_last_block_where_it_is_short(name: str, columns: int) -> None:
    """torch 2.13 splits a loop over k with index k // block into whole blocks, and drops the remainder."""
    fmt = FORMATS[name]

    def rounded(x: Tensor) -> Tensor:
        return dequantize_codes(quantize_codes(x, fmt, *parts), fmt, *parts)

    x = sample(8, columns)
    parts = quantize(x, fmt)[1:]
    torch._dynamo.reset()
    compiled, packed = torch.compile(rounded), quantize(x, fmt)
    assert torch.equal(compiled(x), rounded(x))
    assert torch.equal(torch.compile(lambda: dequantize(packed, fmt, 8, columns))(), rounded(x))
