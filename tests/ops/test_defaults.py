"""Results do not depend on torch.set_default_dtype, nor allocations on torch.set_default_device: both belong to the
user."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitport
from bitport.backends.cpu.moment_tables import Tables
from bitport.export.ops import overload
from bitport.numerics import NUMBER_TYPES, Format, decode_codebook, encode_codebook
from bitport.numerics.types import STATE_TYPES
from bitport.ops import use_kernel
from bitport.ops.device import _try, check_device
from bitport.ops.native_codes import meanings
from bitport.schemes import PRESETS
from bitport.tensor import quantize_tensor
from bitport.train.optim import AdamW

DTYPES = [torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture(params=DTYPES, ids=str)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    before = torch.get_default_dtype()
    yield request.param
    torch.set_default_dtype(before)


def computed(scheme: str, value: Tensor, x: Tensor, ids: Tensor) -> list[Tensor]:
    """Everything computed from a weight, by the chosen kernels and by the generic one."""
    results = []
    for kernel in ("", "generic"):
        with use_kernel(kernel):
            q = quantize_tensor(value, scheme, act_scale=x[:1, :1].abs() if PRESETS[scheme].static else None)
            results += [part for part in q.plain() if part is not None]
            results += [
                q.dequantize(),
                F.linear(x, q),
                F.embedding(ids, q),
                q.to_layout("plain").to_layout("cpu_tiles").qdata,
            ]
    return results


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


@pytest.mark.parametrize("scheme", PRESETS)
def test_of_every_scheme(scheme: str, default_dtype: torch.dtype) -> None:
    given = torch.randn(40, 128), torch.randn(3, 128), torch.tensor([3, 0])
    wanted = computed(scheme, *given)
    torch.set_default_dtype(default_dtype)
    with torch.device("meta"):
        assert same(computed(scheme, *given), wanted)


@pytest.mark.parametrize("dtype", NUMBER_TYPES)
def test_what_native_kernels_are_told_of_codes(dtype: str, default_dtype: torch.dtype) -> None:
    """Native kernels keep these tables for the life of the process."""
    wanted = meanings(dtype)
    torch.set_default_dtype(default_dtype)
    with torch.device("meta"):
        assert str(meanings(dtype)) == str(wanted)  # NaN is not equal to itself
    assert overload("number_table")(dtype).dtype == torch.float32


@pytest.mark.parametrize("name", STATE_TYPES)
def test_moments(name: str, default_dtype: torch.dtype) -> None:
    table, x = STATE_TYPES[name].table, torch.rand(1000)
    codes, fmt = encode_codebook(x, table), Format(dtype=name, block=(1, 64))
    values, kept = decode_codebook(codes, table), Tables(fmt, positive=min(table) >= 0).kept
    torch.set_default_dtype(default_dtype)
    assert same([encode_codebook(x, table), decode_codebook(codes, table)], [codes, values])
    assert same(Tables(fmt, positive=min(table) >= 0).kept, kept)


def test_steps_are_counted(default_dtype: torch.dtype) -> None:
    """bfloat16 cannot represent 257, nor float16 2049."""
    torch.set_default_dtype(default_dtype)
    param = nn.Parameter(torch.ones(4, 64, dtype=torch.float32))
    param.grad = torch.ones_like(param)
    optimizer = AdamW([param])
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0]["step"] = 2049
    optimizer.load_state_dict(state)
    assert optimizer.state[param]["step"].item() == 2049


def test_a_device_is_tried(default_dtype: torch.dtype) -> None:
    _try.cache_clear()
    torch.set_default_dtype(default_dtype)
    check_device(PRESETS["int8-static"], torch.device("cpu"))


def test_a_model(default_dtype: torch.dtype) -> None:
    """As vLLM loads a model: under its default dtype, on its default device."""
    model, x = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 16)), torch.randn(3, 64)
    torch.set_default_dtype(default_dtype)
    with torch.device("meta"):
        bitport.quantize_(model, "nvfp4")
        assert model(x).device.type == "cpu"
