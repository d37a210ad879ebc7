"""The static store: tokens at their positions are those of the growing store, and hidden places are not read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bitport.cache import KeyValueStore, StaticStore
from bitport.errors import ArgumentError
from bitport.numerics import sqnr

ROOM = 100
FORMATS = ("int8", "int4-g32", "int4:int8", "int4-g16-asym", "int3-g16-fzero", "fp8-wo", "nf4-g32", "int8-g24")


def tokens(count: int, width: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, 3, count, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def both(name: str, count: int, dtype: torch.dtype) -> tuple[StaticStore, KeyValueStore]:
    keys, values = tokens(count, 64, 0, dtype), tokens(count, 48, 1, dtype)
    static, growing = StaticStore(name), KeyValueStore(name)
    static.allocate(keys, values, ROOM)
    for at in torch.arange(count).split(7):
        static.write(keys[:, :, at], values[:, :, at], at)
    growing.append(keys, values)
    return static, growing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", FORMATS)
def test_it_holds_and_computes_what_the_growing_store_does(name: str, dtype: torch.dtype) -> None:
    """The order of sums differs only by the panels that are left out, which add nothing: the same bits."""
    static, growing = both(name, 61, dtype)
    assert torch.equal(static.dense_keys()[:, :, :61], growing.dense_keys())
    assert torch.equal(static.dense_values()[:, :, :61], growing.dense_values())
    assert static.nbytes == growing.nbytes // 61 * ROOM
    q = tokens(5, 64, 2, dtype).repeat(1, 2, 1, 1)
    seen = (torch.arange(ROOM) <= torch.arange(56, 61)[:, None])[None, None]
    y = static.attend(q, seen, scale=0.2)
    assert float(sqnr(growing.attend(q, causal=True, scale=0.2), y)) > (120 if dtype == torch.float32 else 50)


def test_places_that_nothing_shows_are_not_read() -> None:
    """Whatever is there: parts of another text, or NaN."""
    static, growing = both("int8", 61, torch.float32)
    for part in static.parts:
        if part.is_floating_point():
            part[:, :, 64:] = torch.nan
    q = tokens(1, 64, 2)
    y = static.attend(q, (torch.arange(ROOM) < 61)[None, None, None])
    assert float(sqnr(growing.attend(q), y)) > 120


def test_memory_of_another_owner() -> None:
    static, _ = both("int4-g32", 10, torch.float32)
    other = StaticStore("int4-g32")
    other.hold(static.parts, 64, 48, torch.float32)
    assert torch.equal(other.dense_values(), static.dense_values())
    assert other.room == ROOM


def test_compiled_in_one_graph() -> None:
    static, growing = both("int4-g32", 10, torch.float32)
    keys, values, q = tokens(1, 64, 3), tokens(1, 48, 4), tokens(1, 64, 5)

    @torch.compile(fullgraph=True)
    def step(position: Tensor) -> Tensor:
        static.write(keys, values, position)
        return static.attend(q, (torch.arange(ROOM) <= position)[None, None, None])

    growing.append(keys, values)
    assert float(sqnr(growing.attend(q), step(torch.tensor([10])))) > 120
    assert torch.equal(static.dense_keys()[:, :, :11], growing.dense_keys())


@pytest.mark.parametrize("name", ["int8", "fp8-wo"])
@pytest.mark.parametrize("position", [-1, ROOM])
def test_a_position_that_there_is_not(name: str, position: int) -> None:
    static, _ = both(name, 10, torch.float32)
    with pytest.raises(IndexError, match=f"index {position} is out of bounds"):
        static.write(tokens(1, 64, 0), tokens(1, 48, 1), torch.tensor([position]))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("int8+last64", r"int8\+last64 keeps some in float until later: take scales of one token"),
        ("int8+first4", "keeps some in float"),
        ("int2-b32x1:int2-g32", "keeps some in float"),
        ("mxfp4-wo", "mxfp4-wo has scales of e8m0, for which PyTorch's compiler writes no code"),
    ],
)
def test_formats_that_need_what_it_cannot_do(name: str, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        StaticStore(name)
