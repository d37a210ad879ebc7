"""Matrices rounded by Triton's kernel have the bits of the generic op, also where they are written into larger ones.
Run by test_triton.py, like on_triton.py."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from bitport.backends.triton import kernels, quantize
from bitport.cache import KeyValueStore
from bitport.numerics import Format
from bitport.ops import OPS, Impl, register_kernel, unregister_kernel, use_kernel
from bitport.ops.convert import format_json
from bitport.schemes import preset
from tests.backends.edges import same, weight
from tests.turns import turns

DEVICE = torch.device(os.environ["TRITON_DEVICE"])
FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FORMATS = {
    name: preset(name).weight
    for name in (
        *("int8", "int8-asym", "int8-g48", "int8-dyn", "int4-g32", "int4-g48-sym", "int4-channel-fzero", "int4-g6"),
        *("int2-g16", "int2-channel-sym", "fp8-wo", "fp8-wo-g32", "fp8-e5m2-wo", "mxfp8", "mxfp4", "mxfp4-g16", "nf4"),
        *("nf4-g32", "nf4-channel"),
    )
} | {
    "e2m1 by rows": Format(dtype="float4_e2m1"),
    "bnb_fp4": Format(dtype="bnb_fp4", block=(1, 32), scale="input"),
    "int4 by powers": Format(dtype="int4", block=(1, 32), scale="e8m0", scale_rule="rceil"),
}
GENERIC = OPS["quantize"].generic

if DEVICE.type == "cpu":
    from tests.backends import interpreter

    interpreter.correct()


def same_bits(got: list[Tensor], want: list[Tensor]) -> None:
    got = [part.cpu() for part in got]
    differing = [at for at, pair in enumerate(zip(got, want, strict=True)) if not same(*map(codes_as_bytes, pair))]
    assert differing == []


def codes_as_bytes(part: Tensor) -> Tensor:
    """float8 codes as bytes: the sign of a NaN counts in these. NaNs of scales only have to be NaNs."""
    return part.view(torch.uint8) if part.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else part


@pytest.mark.parametrize(("name", "dtype"), turns(FORMATS, FLOATS))
def test_the_same_bits(name: str, dtype: str) -> None:
    text = format_json(FORMATS[name])
    for n, k in ((14, 96), (14, 7), (3, 1100)):
        x = weight(n, k, FLOATS[dtype])
        if quantize.refuses(x, text) is None:
            same_bits(kernels.round_matrices(x.to(DEVICE), text), GENERIC(x, text))


def test_every_format_is_taken() -> None:
    assert {
        name: quantize.refuses(torch.empty(2, 96), format_json(fmt)) for name, fmt in FORMATS.items()
    } == dict.fromkeys(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_all_values_of_a_dtype(name: str) -> None:
    """Every bfloat16 in blocks with others of all sizes, and next to a number that makes the scale 1 or so."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.where(x.isnan(), torch.nan, x)[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))]
    near = x[x.abs() < 8].float()
    near = near[: near.numel() // 96 * 96].reshape(-1, 96)
    near[:, ::6] = 7.5
    for each in (x[: 680 * 96].reshape(680, 96), near.bfloat16()):
        text = format_json(FORMATS[name])
        same_bits(kernels.round_matrices(each.to(DEVICE), text), GENERIC(each, text))


@pytest.mark.parametrize("name", ["int8", "int4-g32", "fp8-wo", "mxfp4", "nf4"])
def test_matrices_of_any_strides(name: str) -> None:
    text, x = format_json(FORMATS[name]), torch.randn(3, 96, 2, 4).permute(3, 2, 0, 1)
    same_bits(kernels.round_matrices(x.to(DEVICE), text), GENERIC(x, text))


@pytest.mark.parametrize("name", ["int8", "int4-g32", "int2-channel-sym", "int4-channel-fzero", "fp8-wo", "mxfp4"])
def test_written_where_the_next_tokens_belong(name: str) -> None:
    text, x = format_json(FORMATS[name]), torch.randn(6, 20, 64).bfloat16()
    wanted = GENERIC(x, text)[:3]
    before = GENERIC(torch.randn(6, 20, 64).bfloat16(), text)[:3]
    found: list[Tensor | None] = [part.to(DEVICE) if part.numel() else None for part in before]
    assert kernels.round_into(x[:, 5:9].to(DEVICE), text, 5, *found)
    for part, old, new in zip(found, before, wanted, strict=True):
        if part is not None:
            new = torch.cat(
                [old[:, :5].view(torch.uint8), new[:, 5:9].view(torch.uint8), old[:, 9:].view(torch.uint8)], 1
            )
            assert torch.equal(part.cpu().view(torch.uint8), new)


def test_places_that_are_not_contiguous_are_left() -> None:
    text, x = format_json(FORMATS["int8"]), torch.randn(2, 4, 32, device=DEVICE)
    data, scale = torch.zeros(2, 8, 64, dtype=torch.uint8, device=DEVICE), torch.zeros(2, 8, 1, device=DEVICE)
    assert not kernels.round_into(x, text, 0, data[..., ::2], scale, None)
    assert not data.any()


@pytest.mark.parametrize(
    ("fmt", "shape", "says"),
    [
        (preset("int3").weight, (4, 128), "codes of int3 cross the borders of bytes"),
        (preset("int4-b8x16").weight, (8, 32), "blocks must lie within a row, not be 8x16"),
        (preset("fp8").weight, (8, 32), "blocks must lie within a row, not be 8x32"),
        (preset("int4-g7").weight, (8, 32), "blocks must fill whole bytes, not have 7 columns of 4 bits"),
        (preset("int8").weight, (1, 8193), "blocks must have at most 8192 columns, not 8193"),
        (preset("nvfp4").weight, (8, 32), "scales must be floats, or e8m0 by even or rceil, not e4m3 by floor"),
        (Format(dtype="int8", block=(1, 32), scale="e8m0", scale_rule="ceil"), (8, 32), "not e8m0 by ceil"),
        (preset("int8").weight, (0, 32), "an empty matrix has nothing to round"),
    ],
)
def test_what_it_refuses(fmt: Format, shape: tuple[int, int], says: str) -> None:
    assert says in str(quantize.refuses(torch.empty(shape), format_json(fmt)))


@pytest.mark.parametrize("format", ["int8", "int4-g32", "fp8-wo:nf4-g32"])
def test_a_cache_takes_tokens_by_it(format: str) -> None:
    """Token by token, as the generic kernel rounds them."""
    keys, values = torch.randn(2, 3, 9, 64).bfloat16(), torch.randn(2, 3, 9, 64).bfloat16()
    wanted = KeyValueStore(format)
    with use_kernel("quantize=generic"):
        wanted.append(keys, values)
    calls: list[int] = []

    def into(*args: Any) -> bool:
        calls.append(args[2])
        return kernels.round_into(*args)

    impl = Impl("quantize", "counted", DEVICE.type, kernels.round_matrices, quantize.refuses, priority=99, into=into)
    register_kernel(impl)
    try:
        store = KeyValueStore(format)
        for first, end in ((0, 6), (6, 7), (7, 9)):
            store.append(keys[:, :, first:end].to(DEVICE), values[:, :, first:end].to(DEVICE))
    finally:
        unregister_kernel(impl)
    assert calls == [0, 0, 6, 6, 7, 7]
    assert torch.equal(store.dense_keys().cpu(), wanted.dense_keys())
    assert torch.equal(store.dense_values().cpu(), wanted.dense_values())
