"""quantize and quantize_input round to nearest: every other code of the block is at least as far away.

The samples of these ops are their own expectation, so the reference here is a search over all codes in float64.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bitport.numerics import ACTIVATIONS, Format, Quantized, number_type
from bitport.ops import OPS
from bitport.ops.convert import format_json, from_list
from bitport.ops.reference import code_value, value_of
from bitport.schemes import PRESETS


def expanded(part: Tensor, block: tuple[int, int], n: int, k: int) -> Tensor:
    row, column = torch.arange(n) // block[0], torch.arange(k) // block[1]
    return part.double()[row[:, None], column]


def distances(x: Tensor, parts: Quantized, fmt: Format) -> tuple[Tensor, Tensor, Tensor]:
    """(|x - value|, |x - nearest value|, scale), each [n, k] in float64."""
    n, k = x.shape
    block = fmt.block_shape(n, k)
    number = number_type(fmt.dtype)
    value = value_of(parts, fmt.dtype, n, k, *block)
    scale = expanded(parts.scale.float(), block, n, k) * (1 if parts.scale2 is None else parts.scale2.double())
    offset = 0 if parts.zero is None else expanded(parts.zero, block, n, k) - number.midpoint
    codes = torch.tensor([code_value(number, code) for code in range(number.qmax + 1)], dtype=torch.float64)
    codes = codes[codes.isfinite()]
    every = (codes - (offset[..., None] if parts.zero is not None else 0)) * scale[..., None]
    exact = x.double()
    return (exact - value).abs(), (exact[..., None] - every).abs().amin(-1), scale


def assert_nearest(x: Tensor, parts: Quantized, fmt: Format) -> None:
    """Nearest up to the rounding of x / scale to float32, which may move a tie: 2^-23 of the value, in steps of the
    type."""
    mine, best, scale = distances(x, parts, fmt)
    assert bool((mine <= best + x.double().abs() * 2**-22 + scale * 2**-22).all())


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_inputs(act: str) -> None:
    x = torch.randn(7, 96) * torch.logspace(-3, 3, 7)[:, None]
    parts = from_list(OPS["quantize_input"].overload(x, act, None))
    fmt = ACTIVATIONS[act]
    assert_nearest(x, parts, fmt)
    if fmt.scale == "float32" and fmt.zero == "none":
        rows, columns = fmt.block_shape(7, 96)
        amax = [column.abs().amax() for row in x.split(rows) for column in row.split(columns, 1)]
        wanted = torch.stack(amax).reshape(parts.scale.shape).double() / fmt.number.max
        torch.testing.assert_close(parts.scale.double(), wanted, rtol=2**-23, atol=0)


@pytest.mark.parametrize("name", PRESETS)
def test_weights(name: str) -> None:
    x = torch.randn(16, 150)
    fmt = PRESETS[name].weight
    assert_nearest(x, from_list(OPS["quantize"].overload(x, format_json(fmt))), fmt)


def test_a_static_scale_is_used_as_it_is() -> None:
    x, scale = torch.tensor([[0.0, 0.26, -0.75, 100.0]]), torch.tensor([[0.5]])
    parts = from_list(OPS["quantize_input"].overload(x, "int8-tensor", scale))
    assert value_of(parts, "int8", 1, 4, 1, 4).tolist() == [[0.0, 0.5, -1.0, 63.5]]  # -1.5 steps go to the even -2
