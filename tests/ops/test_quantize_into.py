"""Parts written where the next tokens have their place are those that the op returns, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from bitport.numerics import quantize
from bitport.ops import decide, use_kernel
from bitport.ops.convert import format_json, quantize_into
from bitport.schemes import preset

SCHEMES = ("int8", "int4-g32", "int3-g16-fzero", "int2-b8x1", "fp8-wo", "fp8-e5m2-wo", "mxfp4-wo", "nf4-g32")
COUNT, ROOM, FIRST, N, K = 6, 40, 16, 8, 64


def places(scheme: str, dtype: torch.dtype) -> list[Tensor]:
    """Parts of larger matrices, full of other numbers."""
    parts = quantize(
        torch.randn(COUNT, ROOM, K, generator=torch.Generator().manual_seed(1)).to(dtype), preset(scheme).weight
    )
    return [part for part in parts if part is not None]


def expect_written(scheme: str, value: Tensor, found: list[Tensor]) -> None:
    fmt = preset(scheme).weight
    wanted = places(scheme, value.dtype)
    parts = [part for part in quantize(value, fmt) if part is not None]
    for at, (whole, part) in enumerate(zip(wanted, parts, strict=True)):
        first = FIRST if at == 0 else FIRST // fmt.block[0]
        whole.view(torch.uint8)[:, first : first + part.shape[1]] = part.view(torch.uint8)
    for one, other in zip(wanted, found, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def value(dtype: torch.dtype = torch.bfloat16, count: int = COUNT) -> Tensor:
    return torch.randn(count, N, K, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("kernel", ["", "quantize=generic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_only_its_places_are_written(scheme: str, dtype: torch.dtype, kernel: str) -> None:
    found = places(scheme, dtype)
    with use_kernel(kernel):
        quantize_into(value(dtype), preset(scheme).weight, FIRST, *found)
    expect_written(scheme, value(dtype), found)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_values_and_places_of_any_strides(scheme: str) -> None:
    rows = value().transpose(0, 1).contiguous().transpose(0, 1)
    assert not rows.is_contiguous()
    found = [torch.stack([part, part], -1)[..., 0] for part in places(scheme, torch.bfloat16)]
    assert not any(part.is_contiguous() for part in found)
    quantize_into(rows, preset(scheme).weight, FIRST, *found)
    expect_written(scheme, value(), [part.contiguous() for part in found])


def test_each_of_many_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one thread takes at a time, on one thread and on several."""
    x, fmt = torch.randn(3000, 2, K), preset("int4-g32").weight
    wanted = quantize(x, fmt)
    for threads in (1, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found = [torch.zeros_like(part) for part in wanted if part is not None]
        quantize_into(x, fmt, 0, *found)
        for one, other in zip((part for part in wanted if part is not None), found, strict=True):
            assert torch.equal(one, other)


def test_a_mode_that_watches_sees_the_ops() -> None:
    found = places("int8", torch.bfloat16)
    with FlopCounterMode(display=False):
        quantize_into(value(), preset("int8").weight, FIRST, *found)
    expect_written("int8", value(), found)


def test_an_empty_value_writes_nothing() -> None:
    found, fmt = places("int8", torch.bfloat16), preset("int8").weight
    quantize_into(value()[:, :0], fmt, FIRST, *found)
    for one, other in zip(places("int8", torch.bfloat16), found, strict=True):
        assert torch.equal(one, other)
    assert decide("quantize", value()[:, :0], format_json(fmt)).kernel == "generic"
