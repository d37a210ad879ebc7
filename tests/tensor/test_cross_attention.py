"""nn.MultiheadAttention whose keys are not its queries: torch cuts its weight in three, wherever blocks end."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import bitport
from bitport.errors import ArgumentError
from bitport.numerics import Format, sqnr
from bitport.schemes import Scheme

BLOCKS = Scheme(weight=Format(dtype="float8_e4m3", block=(128, 128)))
WIDTHS = (96, 200)
"""Of which neither is a multiple of 128, nor 200 of the rows of a tile."""


def quantized(width: int, scheme: str | Scheme) -> nn.MultiheadAttention:
    attention = nn.MultiheadAttention(width, 4, batch_first=True).eval()
    bitport.quantize_(attention, scheme, measure=False)
    return attention


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_its_thirds_are_rows_of_the_weight(width: int, inference: bool) -> None:
    attention = quantized(width, BLOCKS)
    exact = bitport.dequantize_(copy.deepcopy(attention).double(), torch.float64)
    queries, keys, values = torch.randn(2, 5, width), torch.randn(2, 7, width), torch.randn(2, 7, width)
    with torch.inference_mode(inference):
        for given in ((queries, keys, keys), (queries, keys, values), (queries, queries, queries + 1)):
            want = exact(*(each.double() for each in given))[0]
            assert sqnr(want, attention(*given)[0]) > 110  # float32: 2^-24 of a number, and of sums over some hundred


@pytest.mark.parametrize("width", WIDTHS)
def test_its_inputs_are_rounded_as_those_of_the_whole(width: int) -> None:
    """Attention of all to all, where queries see keys alone, multiplies by the weight in one piece."""
    attention = quantized(width, "fp8-block")
    queries, keys = torch.randn(2, 5, width), torch.randn(2, 7, width)
    every = torch.cat([queries, keys], 1)
    hidden = torch.zeros(12, 12, dtype=torch.bool)
    hidden[:, :5] = True
    want = attention(every, every, every, attn_mask=hidden)[0][:, :5]
    # out_proj rounds what it gets: sums in another order end on either side of some borders, 2^-4 of a number apart
    assert sqnr(want, attention(queries, keys, keys)[0]) > 40


@pytest.mark.slow
def test_it_is_compiled() -> None:
    attention = quantized(96, "fp8-block")
    given = torch.randn(2, 5, 96), torch.randn(2, 7, 96), torch.randn(2, 7, 96)
    torch.compiler.reset()
    assert sqnr(attention(*given)[0], torch.compile(attention, fullgraph=True)(*given)[0]) > 40  # as above


def test_torch_export_is_told_of_the_blocks() -> None:
    attention = quantized(96, "fp8-block")
    given = torch.randn(2, 5, 96), torch.randn(2, 7, 96), torch.randn(2, 7, 96)
    with pytest.raises(ArgumentError, match=r"cut into pieces of 96: they must be multiples of 128"):
        torch.export.export(attention, given, strict=False)
