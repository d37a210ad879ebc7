"""Products that sum over the rows of a quantized matrix, against the float64 product with its values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from bitport.numerics import sqnr
from bitport.ops.reference import value_of
from bitport.ops.samples import product_budget
from bitport.tensor import QTensor

Make = Callable[..., QTensor]


def test_the_other_side_of_the_matrix(make: Make) -> None:
    """x [M, N] @ q [N, K] sums over rows, which no packed kernel supports: computed from the dequantized weight."""
    q, x = make("int4-g32"), torch.randn(3, 64)
    torch.testing.assert_close(x @ q, x @ q.dequantize())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["int4-g32", "int8-dyn", "mxfp8"])
@pytest.mark.parametrize("k", [64, 96])
def test_a_decoder_tied_to_its_encoder(make: Make, scheme: str, k: int, dtype: torch.dtype) -> None:
    """F.linear with weight.t() sums over rows like x @ weight; in a square matrix only the numbers tell."""
    q, x, bias = make(scheme, 64, k).to(dtype), torch.randn(3, 64, dtype=dtype), torch.randn(k, dtype=dtype)
    y, wanted = F.linear(x, q.t(), bias), x.double() @ value_of(q.plain(), *q.matrix) + bias.double()
    assert y.dtype == dtype
    assert float(sqnr(wanted, y)) >= product_budget(dtype, 64, 3 * k)
