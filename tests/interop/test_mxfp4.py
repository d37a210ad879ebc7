"""MXFP4 of gpt-oss against numbers decoded one at a time in float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

import bitport
from bitport.errors import ArgumentError, BitportError, CheckpointError
from bitport.interop import mxfp4
from bitport.interop.checks import POWERS

from .files import E2M1, assert_as_read, assert_numbers, described, only, read, write

NAME = "model.layers.0.mlp.experts.gate_up_proj"
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def experts(e: int, n: int, k: int, dtype: torch.dtype = torch.uint8) -> tuple[dict[str, Tensor], np.ndarray]:
    """Return (the tensors of the file, the parameter [e, k, n] in float64)."""
    rng = np.random.default_rng(e + n + k)
    codes = rng.integers(0, 16, (e, n, k))
    scales = rng.integers(100, 150, (e, n, k // 32))
    blocks = np.zeros((e, n, k // 32, 16), dtype=np.uint8)
    value = np.zeros((e, k, n))
    for at in np.ndindex(e, n, k):
        expert, row, column = at
        code = int(codes[at])
        blocks[expert, row, column // 32, column % 32 // 2] |= code << (4 * (column % 2))
        value[expert, column, row] = E2M1[code] * 2.0 ** (int(scales[expert, row, column // 32]) - 127)
    exponents = torch.from_numpy(scales.astype(np.uint8)).view(dtype)
    return {f"{NAME}_blocks": torch.from_numpy(blocks), f"{NAME}_scales": exponents}, value


@pytest.mark.parametrize("dtype", POWERS, ids=str)
@pytest.mark.parametrize(("e", "n", "k"), [(1, 1, 32), (3, 10, 64), (2, 32, 96)])
def test_values_are_those_of_the_definition(e: int, n: int, k: int, dtype: torch.dtype) -> None:
    tensors, value = experts(e, n, k, dtype)
    tensors[f"{NAME}_bias"] = torch.zeros(e, n)
    (q,) = (found := read(mxfp4.Reader(CONFIG, torch.bfloat16), tensors)).values()
    assert list(found) == [NAME]
    assert (tuple(q.shape), q.dtype, q.transposed) == ((e, k, n), torch.bfloat16, True)
    assert str(q.scheme) == "mxfp4-wo"
    assert_numbers(q, value)


@pytest.mark.parametrize(("e", "n", "k"), [(1, 1, 32), (3, 10, 64), (2, 32, 96)])
def test_what_is_written_is_what_was_read(e: int, n: int, k: int) -> None:
    tensors, _ = experts(e, n, k)
    tensors |= {name.replace("gate_up", "down"): tensor for name, tensor in experts(e, n + 1, k)[0].items()}
    writer, again = mxfp4.Writer(), {}
    for name, q in read(mxfp4.Reader(CONFIG, torch.bfloat16), tensors).items():
        again |= write(writer, q, name)
    assert_as_read(again, tensors)
    assert writer.config(["lm_head"]) == {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def test_what_it_cannot_hold_is_refused() -> None:
    good, writer = described("mxfp4-wo", (4, 64, 96), "experts", transposed=True, name=NAME), mxfp4.Writer()
    assert writer.refuses(good) is None
    for changes, reason in (
        ({"transposed": False}, "as gpt-oss has them"),
        ({"name": NAME.replace("gate_up_proj", "w1")}, "as gpt-oss has them"),
        ({"kind": "linear", "shape": (64, 96)}, "of the kind 'linear'"),
        ({"scheme": bitport.preset("mxfp4")}, "not mxfp4"),
        ({"scheme": bitport.preset("nvfp4-wo")}, "not nvfp4-wo"),
        ({"scheme": bitport.preset("int4-g32")}, "not int4-g32"),
        ({"shape": (4, 48, 96)}, "and 48 do not divide"),
        ({"parts": good.parts | {"pre_scale"}}, "no pre_scale"),
    ):
        assert reason in str(writer.refuses(dataclasses.replace(good, **changes)))


def test_half_of_the_experts_is_refused() -> None:
    tensors, _ = experts(2, 4, 64)
    q = only(mxfp4.Reader(CONFIG, torch.bfloat16), tensors)
    writer = mxfp4.Writer()
    writer.write(NAME, q)
    with pytest.raises(ArgumentError, match=r"mlp\.experts: down_proj is not quantized"):
        writer.config([])


def test_the_ends_of_the_exponent() -> None:
    tensors, _ = experts(1, 1, 64)
    tensors[f"{NAME}_blocks"].fill_(0x22)
    tensors[f"{NAME}_scales"] = torch.tensor([[[0, 255]]], dtype=torch.uint8)
    q = only(mxfp4.Reader(CONFIG, torch.bfloat16), tensors)
    value = q.dequantize(torch.float32)
    assert bool((value[:, :32] == 2.0**-127).all())
    assert bool(value[:, 32:].isnan().all())


DAMAGED: list[tuple[str, Tensor | None]] = [
    ("blocks", torch.zeros(2, 4, 2, 16, dtype=torch.int8)),
    ("blocks", torch.zeros(2, 4, 2, 8, dtype=torch.uint8)),
    ("blocks", torch.zeros(2, 4, 3, 16, dtype=torch.uint8)),
    ("blocks", torch.zeros(2, 4, 32, dtype=torch.uint8)),
    ("blocks", torch.zeros(0, 4, 2, 16, dtype=torch.uint8)),
    ("blocks", torch.tensor(0, dtype=torch.uint8)),
    ("blocks", None),
    ("scales", torch.zeros(2, 4, 2, dtype=torch.float32)),
    ("scales", torch.zeros(2, 4, 3, dtype=torch.uint8)),
    ("scales", torch.zeros(2, 8, dtype=torch.uint8)),
    ("scales", None),
]


@pytest.mark.parametrize(("end", "tensor"), DAMAGED)
def test_damaged_tensors_are_errors(end: str, tensor: Tensor | None) -> None:
    tensors, _ = experts(2, 4, 64)
    del tensors[f"{NAME}_{end}"]
    if tensor is not None:
        tensors[f"{NAME}_{end}"] = tensor
    with pytest.raises(BitportError, match=NAME):
        read(mxfp4.Reader(CONFIG, torch.bfloat16), tensors)


def test_a_weight_half_of_which_is_missing_is_named() -> None:
    tensors, _ = experts(2, 4, 64)
    del tensors[f"{NAME}_blocks"]
    with pytest.raises(CheckpointError, match=r"is there without .*_blocks"):
        read(mxfp4.Reader(CONFIG, torch.bfloat16), tensors)
