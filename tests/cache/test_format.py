"""The names of cache formats, and what they refuse."""

from __future__ import annotations

import pytest

from bitport.cache import CacheFormat, cache_format
from bitport.errors import SchemeError
from bitport.numerics import Format
from bitport.schemes import preset


@pytest.mark.parametrize(
    ("name", "keys", "values", "first", "last"),
    [
        ("int8", "int8", "int8", 0, 0),
        ("int4-g32", "int4-g32", "int4-g32", 0, 0),
        ("int2-b32x1:int2-g32", "int2-b32x1", "int2-g32", 0, 0),
        ("fp8-wo+last64", "fp8-wo", "fp8-wo", 0, 64),
        ("nf4-g32:int4-g32-sym+first4+last128", "nf4-g32", "int4-g32-sym", 4, 128),
    ],
)
def test_a_name_says_it_all(name: str, keys: str, values: str, first: int, last: int) -> None:
    wanted = CacheFormat(keys=preset(keys).weight, values=preset(values).weight, first=first, last=last)
    assert cache_format(name) == wanted
    assert cache_format(wanted) is wanted


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("int9", "unknown scheme 'int9'"),
        ("", "write KEYS"),
        ("int8:", "write KEYS"),
        ("int8+last", "write KEYS"),
        ("int8+last4+first4", "write KEYS"),
        ("int8+last9999999999", "write KEYS"),
        ("int8-dyn", "rounds the inputs.*weight-only"),
        ("int8:mxfp4", "mxfp4 rounds the inputs"),
        ("int8-tensor", "keys .* one scale cannot serve all tokens"),
        ("int8:int4-tensor", "values .* one scale cannot serve all tokens"),
        ("nvfp4-wo", "a global scale cannot serve all tokens"),
    ],
)
def test_what_is_no_format_says_why(name: str, says: str) -> None:
    with pytest.raises(SchemeError, match=says):
        cache_format(name)


@pytest.mark.parametrize("which", ["first", "last"])
def test_a_number_of_tokens_is_not_negative(which: str) -> None:
    int8 = Format(dtype="int8")
    with pytest.raises(SchemeError, match=f"{which}=-1"):
        CacheFormat(keys=int8, values=int8, **{which: -1})


def test_all_tokens_are_quantized_unless_asked() -> None:
    int8 = Format(dtype="int8")
    assert CacheFormat(keys=int8, values=int8).quantized(5) == 5


@pytest.mark.parametrize(
    ("name", "quantized"),
    [
        ("int8", {0: 0, 1: 1, 99: 99}),
        ("int8+first4", {3: 0, 4: 0, 5: 1, 99: 95}),
        ("int8+last10", {41: 0, 42: 32, 73: 32, 74: 64}),
        ("int2-b8x1:int4-g32", {7: 0, 8: 8, 99: 96}),
        ("int2-b8x1:int2-b12x1", {23: 0, 24: 24, 99: 96}),
        ("int2-b48x1+first2+last1", {50: 0, 51: 48, 98: 48, 99: 96}),
    ],
)
def test_how_many_tokens_are_quantized(name: str, quantized: dict[int, int]) -> None:
    fmt = cache_format(name)
    assert {tokens: fmt.quantized(tokens) for tokens in quantized} == quantized
