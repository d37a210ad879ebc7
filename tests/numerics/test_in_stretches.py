"""dequantize_now: bit for bit dequantize, whatever the number type, the shape and the length of a stretch, in little
memory, and only where nothing is traced."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from bitport.numerics import (
    NUMBER_TYPES,
    Format,
    Quantized,
    dequantize,
    dequantize_now,
    in_stretches,
    is_computed,
    number_type,
    quantize,
    stretches,
    to_storage,
)
from bitport.numerics.types import STATE_TYPES
from bitport.schemes.presets import PRESETS, preset

SHAPES = ((5, 77), (33, 129), (130, 256), (1, 1), (2, 3, 40, 96))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether dtype, shape and strides agree, and all bits."""
    alike = (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
    return alike and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.fixture(params=[1, 700, 1 << 19], ids=lambda size: f"{size} numbers")
def length(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_stretches, "AT_ONCE", request.param)
    monkeypatch.setattr(in_stretches, "PER_THREAD", 1)


@pytest.fixture
def generic(monkeypatch: pytest.MonkeyPatch) -> None:
    """dequantize_now may not call dequantize."""
    monkeypatch.setattr(in_stretches, "dequantize", None)


@pytest.mark.usefixtures("length", "generic")
@pytest.mark.parametrize("scheme", PRESETS)
def test_every_scheme_bit_for_bit(scheme: str) -> None:
    fmt, generator = preset(scheme).weight, torch.Generator().manual_seed(1)
    for shape in SHAPES:
        q = quantize(torch.randn(*shape, generator=generator), fmt)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            assert same_bits(dequantize_now(q, fmt, *shape[-2:], dtype), dequantize(q, fmt, *shape[-2:], dtype))


def formats() -> Iterator[tuple[Format, tuple[int, int]]]:
    for name in (*NUMBER_TYPES, *STATE_TYPES):
        if name != "float8_e8m0":
            yield Format(dtype=name, block=(1, 32)), (9, 256)
    for block in ((0, 0), (1, 0), (4, 32), (128, 128), (7, 5), (0, 16)):
        for zero in ("none", "int", "float"):
            yield Format(dtype="int4", block=block, zero=zero), (40, 75)


@pytest.mark.usefixtures("length", "generic")
@pytest.mark.parametrize(("fmt", "shape"), formats(), ids=lambda each: str(each).replace("Format", ""))
def test_every_code_and_every_block_bit_for_bit(fmt: Format, shape: tuple[int, int]) -> None:
    """All codes of the type, NaN and infinity among them."""
    n, k = shape
    q = quantize(torch.randn(n, k, generator=torch.Generator().manual_seed(2)), fmt)
    codes = (torch.arange(n * k) % (1 << number_type(fmt.dtype).bits)).to(torch.uint8).reshape(n, k)
    q = q._replace(data=to_storage(codes, number_type(fmt.dtype)))
    assert same_bits(dequantize_now(q, fmt, n, k), dequantize(q, fmt, n, k))


@pytest.mark.usefixtures("length", "generic")
def test_strided_parts_and_empty_matrices() -> None:
    fmt = Format(dtype="nf4", block=(1, 32))
    whole = quantize(torch.randn(12, 128), fmt)
    some = Quantized(whole.data[::2, 16:48], whole.scale[::2, 1:3])
    assert same_bits(dequantize_now(some, fmt, 6, 64), dequantize(some, fmt, 6, 64))
    for n, k in ((0, 64), (3, 0)):
        empty = quantize(torch.randn(n, k), fmt)
        assert dequantize_now(empty, fmt, n, k, torch.bfloat16).shape == (n, k)


@pytest.mark.parametrize("block", [1, 3, 8, 20, 21])
@pytest.mark.parametrize("most", [1, 2, 5, 8, 21, 100])
def test_stretches_cover_the_rows_and_do_not_break_blocks(block: int, most: int) -> None:
    n = 21
    data, scale = torch.arange(n)[:, None], torch.arange(-(-n // block))[:, None]
    next_row = 0
    for rows, parts in stretches(Quantized(data, scale, None, None), block, most):
        assert rows.start == next_row
        assert 1 <= rows.stop - rows.start <= most
        next_row = rows.stop
        assert parts.data.flatten().tolist() == [*range(rows.start, rows.stop)]
        wanted = [row // block for row in range(rows.start, rows.stop)]
        offset = 0 if len(parts.scale) == 1 else rows.start % block
        assert [int(parts.scale[(row + offset) // block]) for row in range(rows.stop - rows.start)] == wanted
        assert offset == 0
    assert next_row == n


def test_a_big_endian_machine_unpacks_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "byteorder", "big")
    fmt = Format(dtype="int3", block=(1, 32))
    q = quantize(torch.randn(4, 64), fmt)
    assert same_bits(dequantize_now(q, fmt, 4, 64), dequantize(q, fmt, 4, 64))


class Watched(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        return func(*args, **(kwargs or {}))


def test_what_is_traced_gets_the_definition() -> None:
    fmt = Format(dtype="int4", block=(1, 32))
    q = quantize(torch.randn(4, 64), fmt)
    assert is_computed(*q)
    assert not is_computed(q.data, q.scale.clone().requires_grad_())
    with Watched():
        assert not is_computed(*q)
    with FakeTensorMode() as mode:
        fake = Quantized(*(None if part is None else mode.from_tensor(part) for part in q))
        assert dequantize_now(fake, fmt, 4, 64).shape == (4, 64)
    assert not is_computed(fake.data)

    def run(by: Callable[..., Tensor]) -> str:
        return str(make_fx(lambda data, scale: by(Quantized(data, scale), fmt, 4, 64))(q.data, q.scale).code)

    assert run(dequantize_now) == run(dequantize)
    mapped = torch.vmap(lambda data: dequantize_now(Quantized(data, q.scale), fmt, 4, 64))(q.data.expand(2, -1, -1))
    assert torch.equal(mapped[1], dequantize(q, fmt, 4, 64))


def test_learned_scales_have_a_gradient() -> None:
    fmt = Format(dtype="int4", block=(1, 32))
    q = quantize(torch.randn(4, 64), fmt)
    scale = q.scale.clone().requires_grad_()
    dequantize_now(q._replace(scale=scale), fmt, 4, 64).sum().backward()
    codes = dequantize(q._replace(scale=torch.ones_like(scale)), fmt, 4, 64)
    assert torch.equal(scale.grad, codes.reshape(4, 2, 32).sum(-1))
