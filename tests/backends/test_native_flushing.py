"""A thread that flushes subnormal floats to zero (``torch.set_flush_denormal``) gets the same numbers: subnormals of
float16 and float8 are not subnormal in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import bitport as bp
from bitport.backends.cpu.native import Library
from bitport.ops import OPS, decide
from bitport.ops.attention import sample
from bitport.ops.convert import format_json
from bitport.schemes import preset
from tests.backends.taken import compiled

pytestmark = [
    compiled,
    pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor does not flush"),
]
WEIGHTS = pytest.mark.parametrize(("scheme", "dtype"), [("int4-g32", torch.float16), ("nvfp4-wo", torch.bfloat16)])


@contextmanager
def flushing() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def weight(dtype: torch.dtype) -> Tensor:
    """Rows of all magnitudes: the smallest have scales that are subnormal in float16, or in e4m3 relative to the global
    scale."""
    return (torch.randn(64, 96) * torch.logspace(-6, 0, 64)[:, None]).to(dtype)


@WEIGHTS
def test_rounding(library: Library, scheme: str, dtype: torch.dtype) -> None:
    x = weight(dtype)
    expected = bp.quantize_tensor(x, scheme)
    assert decide("quantize", x, format_json(preset(scheme).weight)).kernel == "native"
    with flushing():
        got = bp.quantize_tensor(x, scheme)
    assert all(a is None or b is None or torch.equal(a, b) for a, b in zip(got.parts, expected.parts, strict=True))


@WEIGHTS
@pytest.mark.parametrize("m", [1, 5, 40])
def test_products_and_rows(library: Library, scheme: str, dtype: torch.dtype, m: int) -> None:
    w, x = bp.quantize_tensor(weight(dtype), scheme), torch.randn(m, 96, dtype=dtype)
    subnormal = 2.0**-14 if dtype == torch.float16 else 2.0**-6
    assert (w.scale.float() < subnormal).any()
    ids = torch.arange(64)
    expected = torch.nn.functional.linear(x, w), torch.nn.functional.embedding(ids, w), w.dequantize()
    with flushing():
        got = torch.nn.functional.linear(x, w), torch.nn.functional.embedding(ids, w), w.dequantize()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_keys_and_values(library: Library) -> None:
    args = sample("subnormal", torch.device("cpu"), torch.float32, "fp8-wo", "fp8-wo-g32", tokens=70).args
    expected = OPS["attention"].overload(*args)
    with flushing():
        assert torch.equal(OPS["attention"].overload(*args), expected)
