"""AWQ files against numbers packed by plain Python and multiplied in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import bitport
from bitport.errors import ArgumentError, BitportError, CheckpointError
from bitport.interop import awq
from bitport.interop.sources import description
from bitport.tensor import QTensor

from .files import assert_as_read, assert_numbers, described, interleaved, only, read, words, write

"""Columns along N in a gemm word, from the lowest four bits up."""
CASES = ((8, 32, 32), (24, 96, 32), (64, 320, 64), (16, 256, 128), (8, 48, 16))


def layer(
    n: int, k: int, group: int, version: str = "gemm", symmetric: bool = False
) -> tuple[dict[str, Tensor], np.ndarray]:
    """Return (the tensors of a layer, its weight in float64)."""
    rng = np.random.default_rng(n + k + group)
    groups = k // group
    codes = rng.integers(0, 16, (n, k))
    zeros = np.full((n, groups), 8) if symmetric else rng.integers(0, 16, (n, groups))
    scales = rng.uniform(0.001, 0.1, (n, groups)).astype(np.float16)
    value = (codes - zeros.repeat(group, 1)) * scales.astype(np.float64).repeat(group, 1)
    if version == "gemm":
        parts = (interleaved(codes.T), interleaved(zeros.T), scales.T.copy())
    else:
        times = {64: 2, 32: 4, 16: 8}.get(group, 1)
        fill = -(-groups // (8 * times)) * 8 * times - groups
        parts = (words(codes, 4), words(np.pad(zeros, ((0, 0), (0, fill))), 4), np.pad(scales, ((0, 0), (0, fill))))
    names = ("m.qweight", "m.qzeros", "m.scales")
    return {name: torch.from_numpy(part) for name, part in zip(names, parts, strict=True)}, value


def config(group: int, **more: object) -> dict[str, object]:
    return {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": group, "zero_point": True, **more}


@pytest.mark.parametrize("version", awq.VERSIONS)
@pytest.mark.parametrize(("n", "k", "group"), CASES)
def test_values_are_those_of_the_definition(n: int, k: int, group: int, version: str) -> None:
    tensors, value = layer(n, k, group, version)
    found = read(awq.Reader(config(group, version=version), torch.float16), tensors)
    (q,) = found.values()
    assert list(found) == ["m.weight"]
    assert (q.dtype, tuple(q.shape)) == (torch.float16, (n, k))
    assert str(q.scheme) == ("int4" if group == 128 else f"int4-g{group}")
    # A code minus a zero point has at most 5 bits, and a float16 scale 11: float32 holds the product exactly.
    assert_numbers(q, value)


@pytest.mark.parametrize(
    "said",
    [
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM"},
        {"quant_method": "awq", "bits": 4, "group_size": 32, "format": "gemm", "version": "GEMM", "method": "awq"},
        {"quant_method": "awq", "bits": 4, "group_size": 32, "modules_to_not_convert": ["lm_head"]},
    ],
    ids=["AutoAWQ's own", "format", "nothing of a version"],
)
def test_both_spellings_of_settings(said: dict[str, object]) -> None:
    tensors, value = layer(16, 64, 32)
    q = only(awq.Reader(said, torch.bfloat16), tensors)
    assert_numbers(q, value)


def test_one_group_for_a_row() -> None:
    tensors, value = layer(8, 96, 96)
    q = only(awq.Reader(config(-1), torch.float16), tensors)
    assert str(q.scheme) == "int4-channel"
    assert_numbers(q, value)


@pytest.mark.parametrize(("zero_point", "symmetric", "name"), [(False, True, "int4-sym"), (True, True, "int4")])
def test_zero_points_of_eight(zero_point: bool, symmetric: bool, name: str) -> None:
    tensors, value = layer(8, 128, 128, symmetric=symmetric)
    q = only(awq.Reader(config(128, zero_point=zero_point), torch.float16), tensors)
    assert (str(q.scheme), q.zero is None) == (name, not zero_point)
    assert_numbers(q, value)


def test_zero_points_are_kept_where_they_are_not_what_symmetric_means() -> None:
    tensors, value = layer(8, 128, 128)
    q = only(awq.Reader(config(128, zero_point=False), torch.float16), tensors)
    assert str(q.scheme) == "int4"
    assert_numbers(q, value)


def written(q: QTensor) -> tuple[dict[str, Tensor], dict[str, object]]:
    writer = awq.Writer()
    return write(writer, q), writer.config(["lm_head"])


@pytest.mark.parametrize("symmetric", [False, True], ids=["zero points", "symmetric"])
@pytest.mark.parametrize(("n", "k", "group"), CASES)
def test_what_is_written_is_what_was_read(n: int, k: int, group: int, symmetric: bool) -> None:
    tensors, _ = layer(n, k, group, symmetric=symmetric)
    q = only(awq.Reader(config(group, zero_point=not symmetric), torch.float16), tensors)
    again, said = written(q)
    assert_as_read(again, tensors)
    assert said == {**config(group), "zero_point": not symmetric, "modules_to_not_convert": ["lm_head"]}


@pytest.mark.parametrize("scheme", ["int4", "int4-g32", "int4-g32-sym", "int4-channel"])
def test_our_own_weights_survive(scheme: str) -> None:
    value = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    q = bitport.quantize_tensor(value.half(), scheme).to_layout("plain")
    tensors, said = written(q)
    back = only(awq.Reader(said, torch.float16), tensors)
    assert torch.equal(back, q)


def test_gemv_is_written_as_gemm() -> None:
    tensors, value = layer(16, 256, 64, "gemv")
    q = only(awq.Reader(config(64, version="gemv"), torch.float16), tensors)
    again, said = written(q)
    assert_numbers(read(awq.Reader(said, torch.float16), again)["m.weight"], value)


def test_a_scale_that_is_no_float16_is_refused() -> None:
    q = bitport.quantize_tensor(torch.randn(8, 64) * 1e-7, "int4-g32-sym").to_layout("plain")
    with pytest.raises(ArgumentError, match=r"is no float16; --scales float16"):
        written(q)


def test_a_zero_point_that_needs_five_bits_is_refused() -> None:
    tensors, _ = layer(8, 64, 32)
    q = only(awq.Reader(config(32), torch.float16), tensors)
    assert q.zero is not None
    q.zero[3, 1] = 16
    with pytest.raises(ArgumentError, match="zero point 16 does not fit"):
        written(q)


@pytest.mark.parametrize("scheme", ["nf4", "int4-fzero", "fp8-row", "int4-int8", "int5", "int8", "int4-b32x32"])
def test_schemes_that_it_cannot_hold_are_refused(scheme: str) -> None:
    q = bitport.quantize_tensor(torch.randn(64, 128), scheme).to_layout("plain")
    assert "AWQ holds integers of 4 bits" in str(awq.Writer().refuses(description("m.weight", q)))


def test_other_refusals() -> None:
    writer = awq.Writer()
    assert writer.refuses(described("int4")) is None
    for bad, reason in (
        (described("int4", (60, 128)), "60x128"),
        (described("int4", (64, 192)), "64x192"),
        (described("int4-sym"), "one scheme"),
    ):
        assert reason in str(writer.refuses(bad))


@pytest.mark.parametrize(
    "change",
    [
        {"bits": 8},
        {"bits": "4"},
        {"bits": True},
        {"bits": None},
        {"group_size": 0},
        {"group_size": None},
        {"group_size": 10**30},
        {"zero_point": "yes"},
        {"version": "gemv_fast"},
        {"version": "gemm", "format": "gemv"},
        {"checkpoint_format": "gemv", "version": None},
        {"q_group_size": 64},
        {"method": "gptq"},
        {"version": 3},
        {"backend": "llm-awq"},
    ],
    ids=str,
)
def test_settings_that_are_not_understood_are_errors(change: dict[str, object]) -> None:
    tensors, _ = layer(16, 64, 32)
    with pytest.raises(CheckpointError):
        read(awq.Reader({**config(32), **change}, torch.float16), tensors)


DAMAGED: list[tuple[str, Tensor | None]] = [
    ("m.qweight", torch.zeros(64, 2, dtype=torch.int64)),
    ("m.qweight", torch.zeros(63, 2, dtype=torch.int32)),
    ("m.qweight", torch.zeros(64, dtype=torch.int32)),
    ("m.qweight", torch.zeros(0, 0, dtype=torch.int32)),
    ("m.qweight", torch.tensor(0, dtype=torch.int32)),
    ("m.qweight", None),
    ("m.qzeros", torch.zeros(2, 3, dtype=torch.int32)),
    ("m.qzeros", torch.zeros(3, 2, dtype=torch.int32)),
    ("m.qzeros", torch.zeros(2, 2, dtype=torch.float32)),
    ("m.qzeros", torch.zeros(4, dtype=torch.int32)),
    ("m.qzeros", None),
    ("m.scales", torch.zeros(2, 15, dtype=torch.float16)),
    ("m.scales", torch.zeros(2, 16, dtype=torch.int32)),
    ("m.scales", torch.zeros(32, dtype=torch.float16)),
    ("m.scales", None),
    ("mlp.act.scales", torch.zeros(16)),
]


@pytest.mark.parametrize("version", awq.VERSIONS)
@pytest.mark.parametrize(("name", "tensor"), DAMAGED)
def test_damaged_tensors_are_errors(name: str, tensor: Tensor | None, version: str) -> None:
    tensors, _ = layer(16, 64, 32, version)
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    with pytest.raises(BitportError, match=name):
        read(awq.Reader(config(32, version=version), torch.float16), tensors)


def test_an_error_names_what_it_cannot_place() -> None:
    tensors, _ = layer(16, 64, 32)
    with pytest.raises(CheckpointError, match=r"m\.qweight: 64 columns are no whole groups of 48"):
        read(awq.Reader(config(48), torch.float16), tensors)
    with pytest.raises(CheckpointError, match=r"version 'marlin': gemm, gemv are read"):
        awq.Reader(config(32, version="marlin"), torch.float16)
