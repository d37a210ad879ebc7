"""A weight processed some rows at a time gives the same numbers as in one piece, wherever it is split."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bitport.nn.quantize import error_of
from bitport.numerics import error, numbers_at_once, sqnr
from bitport.ops import by_rows, use_kernel
from bitport.ops.by_rows import dequantized_rows
from bitport.ops.weight import Weight
from bitport.tensor import quantize_tensor

SHAPES = {
    "linear": ((130, 256), {}),
    "one row": ((1, 256), {}),
    "no rows": ((0, 256), {}),
    "experts": ((3, 66, 256), {"kind": "experts"}),
    "transposed": ((3, 256, 66), {"kind": "experts", "transposed": True}),
    "conv": ((66, 16, 4, 4), {"kind": "conv"}),
}
SCHEMES = ("int4", "int3-g32-sym", "int8", "fp8-row", "fp8-block", "mxfp4-wo", "nvfp4-wo", "nf4")
PIECES = (100, 1000, 1 << 14)
"""Elements per piece: less than a row, some rows, all of the small weights."""


@pytest.fixture(params=PIECES)
def small_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    for module in (by_rows, error):
        monkeypatch.setattr(module, numbers_at_once.__name__, lambda device: request.param)
    return int(request.param)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_error_is_that_of_the_whole(
    scheme: str, shape: str, small_pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(by_rows.DISTANCES, "cpu", raising=False)
    _compare(scheme, shape, torch.bfloat16)


@pytest.mark.skipif("cpu" not in by_rows.DISTANCES, reason="the native kernels were not compiled")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "no rows"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_error_by_the_kernel_of_the_cpu(
    scheme: str, shape: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The native kernel does not take float64."""
    answers, distance = [], by_rows.DISTANCES["cpu"]

    def seen(value: torch.Tensor, weight: Weight) -> torch.Tensor | None:
        answers.append(distance(value, weight))
        return answers[-1]

    monkeypatch.setitem(by_rows.DISTANCES, "cpu", seen)
    _compare(scheme, shape, dtype)
    assert answers
    assert all((answer is None) == (dtype == torch.float64) for answer in answers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1e-30, 1e-18, 1e15, 1e30])
def test_the_error_where_squares_leave_the_range_of_float32(size: float, dtype: torch.dtype) -> None:
    value = (torch.randn(40, 2056) * size).to(dtype)
    value[:, :600] = 0  # a piece without error
    q = quantize_tensor(value, "int8")
    exact, rounded = value.double(), q.dequantize(torch.float32).double()
    expected = 10 * torch.log10(exact.square().sum() / (exact - rounded).square().sum())
    assert error_of(value, q) == pytest.approx(float(expected), abs=1e-5)


def _compare(scheme: str, shape: str, dtype: torch.dtype) -> None:
    size, options = SHAPES[shape]
    value = torch.randn(size, dtype=dtype)
    q = quantize_tensor(value.float() if dtype == torch.float64 else value, scheme, **options)
    exact, rounded = value.double(), q.dequantize(torch.float32).double()
    expected = 10 * torch.log10(exact.square().sum() / (exact - rounded).square().sum())
    found = error_of(value, q)
    assert found == float("inf") if not value.numel() else found == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize("kernel", ["", "embedding=generic"])
def test_columns_lie_where_those_of_the_value_do(kernel: str, small_pieces: int) -> None:
    value = torch.randn(66, 256)
    extra: dict[str, Any] = {"perm": torch.randperm(256), "pre_scale": torch.rand(256) + 0.5}
    q = quantize_tensor(value, "int4", **extra)
    with use_kernel(kernel):
        pieces = list(dequantized_rows(q))
    assert torch.equal(torch.cat([rows for _, rows in pieces]), q.dequantize(torch.float32))
    assert len(pieces) == -(-66 // max(1, small_pieces // 256))


@pytest.mark.parametrize("shape", [(1,), (999,), (7, 333), (3, 5, 121), ()])
def test_squares_of_pieces(shape: tuple[int, ...], small_pieces: int) -> None:
    reference, value = torch.randn(shape), torch.randn(shape)
    expected = 10 * torch.log10(reference.double().square().sum() / (reference.double() - value).square().sum())
    assert float(sqnr(reference, value)) == pytest.approx(float(expected), abs=1e-9)
    if len(shape) > 1:
        assert float(sqnr(reference.mT, value.mT)) == pytest.approx(float(expected), abs=1e-9)
