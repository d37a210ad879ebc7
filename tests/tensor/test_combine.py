"""Quantized matrices joined into one: its value is bit for bit that of the pieces."""

from __future__ import annotations

import pytest
import torch

from bitport.errors import ArgumentError
from bitport.schemes import PRESETS, preset
from bitport.tensor import QTensor, quantize_tensor
from bitport.tensor.combine import concatenated, stacked
from bitport.tensor.parts import check_parts

SCHEMES = [*PRESETS, "int4-g32-sym", "int4-fzero", "int8-tensor", "fp8-b32x64", "int3-b48x32", "nf4-channel"]


def piece(scheme: str, n: int = 64, **extra: torch.Tensor) -> QTensor:
    return quantize_tensor(torch.randn(n, 128) * torch.rand(1) * 4, preset(scheme), **extra)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_stacked(scheme: str) -> None:
    pieces = [piece(scheme) for _ in range(3)]
    whole = stacked(pieces)
    assert whole.batched
    assert whole.scheme == pieces[0].scheme
    assert torch.equal(whole.dequantize(), torch.stack([each.dequantize() for each in pieces]))


@pytest.mark.parametrize("sizes", [(64, 64), (64, 96, 40), (33, 7)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_beside(scheme: str, sizes: tuple[int, ...]) -> None:
    pieces = [piece(scheme, n) for n in sizes]
    whole = concatenated(pieces)
    assert whole.shape == (sum(sizes), 128)
    check_parts(whole.parts, whole.scheme.weight, whole.matrix)  # as a checkpoint of it is checked when it is read
    assert torch.equal(whole.dequantize(), torch.cat([each.dequantize() for each in pieces]))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_beside(scheme: str, turned: bool) -> None:
    pieces = [stacked([piece(scheme, n) for _ in range(3)]) for n in (40, 24)]
    pieces = [each.mT for each in pieces] if turned else pieces
    wanted = torch.cat([each.dequantize() for each in pieces], 2 if turned else 1)
    assert torch.equal(concatenated(pieces).dequantize(), wanted)


@pytest.mark.parametrize(
    ("scheme", "becomes"),
    [
        ("int4-g32", "int4-g32"),
        ("fp8-row", "fp8-row"),
        ("fp8", "fp8-channel"),
        ("fp8-b64x128", "fp8-b64x128"),
        ("fp8-block", "fp8-block-g128"),
    ],
)
def test_the_scheme_changes_only_where_scales_would_reach_over_two_pieces(scheme: str, becomes: str) -> None:
    assert concatenated([piece(scheme), piece(scheme)]).scheme == preset(becomes)


def test_transposed() -> None:
    pieces = [piece("int4-g32").t() for _ in range(2)]
    assert torch.equal(stacked(pieces).dequantize(), torch.stack([each.dequantize() for each in pieces]))
    assert torch.equal(concatenated(pieces).dequantize(), torch.cat([each.dequantize() for each in pieces], 1))


@pytest.mark.parametrize("scheme", ["int4", "int8", "nf4", "fp8-wo", "int8-tensor"])
@pytest.mark.parametrize("kernel", [(1, 4), (8, 3, 3)])
def test_convolutions(scheme: str, kernel: tuple[int, ...]) -> None:
    pieces = [quantize_tensor(torch.randn(n, *kernel), preset(scheme), kind="conv") for n in (32, 16)]
    assert torch.equal(concatenated(pieces).dequantize(), torch.cat([each.dequantize() for each in pieces]))


def test_what_the_whole_has_once() -> None:
    scale, other = torch.full((1, 1), 0.5), torch.full((1, 1), 0.25)
    whole = concatenated([piece("int8-static", act_scale=scale), piece("int8-static", act_scale=scale)])
    assert whole.act_scale is not None
    assert torch.equal(whole.act_scale, scale)
    with pytest.raises(ArgumentError, match="the pieces differ in act_scale"):
        concatenated([piece("int8-static", act_scale=scale), piece("int8-static", act_scale=other)])
    for others in ({}, {"pre_scale": torch.rand(128)}):
        with pytest.raises(ArgumentError, match="each has its own pre_scale, the whole only one"):
            stacked([piece("int4", pre_scale=torch.rand(128)), piece("int4", **others)])


def test_unlike_pieces() -> None:
    for others in (piece("int8"), quantize_tensor(torch.randn(64, 128).bfloat16(), "int4")):
        with pytest.raises(ArgumentError, match="cannot be stacked: they are not alike"):
            stacked([piece("int4"), others])
