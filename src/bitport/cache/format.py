"""Formats of a cache, by name::

    KEYS[:VALUES][+first<N>][+last<N>]        int8    fp8-wo    int4-g32    int2-b32x1:int2-g32+last64    float

KEYS and VALUES are names of weight-only schemes; VALUES defaults to KEYS. A token is a row and its head dimension the
columns: ``-channel`` is one scale per token, ``-g32`` one per 32 numbers of it, ``-b32x1`` one per channel over 32
tokens, which suits keys: a few of their channels are large at every token.

``+first4`` keeps the first 4 tokens in float, ``+last64`` at least the newest 64. ``float`` keeps all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import sys

from bitport.errors import SchemeError
from bitport.numerics import Format
from bitport.schemes import preset

AT_ONCE = 32
"""Tokens leave the window of the newest ones at least this many at a time, in whole blocks."""
FLOAT = "float"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheFormat:
    """How a cache keeps tokens; docs/kv-cache.md explains the names, such as "int4-g32+last64".

    ``keys``, ``values``: their number formats. ``first``, ``last``: so many of the oldest and of the newest tokens
    stay in float. Those between do too until a full step of them can be quantized.
    """

    keys: Format
    values: Format
    first: int = 0
    last: int = 0

    def __post_init__(self) -> None:
        for name, fmt in (("keys", self.keys), ("values", self.values)):
            if fmt.block[0] == 0:
                raise SchemeError(
                    f"{name} of a cache grow, so one scale cannot serve all tokens: give each token its own, or use "
                    "-g<N>"
                )
            if fmt.global_scale:
                raise SchemeError(
                    f"{name} of a cache grow, so a global scale cannot serve all tokens: take a format without one"
                )
        if self.first < 0 or self.last < 0:
            raise SchemeError(f"first={self.first}, last={self.last}: a number of tokens cannot be negative")

    @property
    def block(self) -> int:
        """Tokens that are quantized together."""
        return math.lcm(self.keys.block[0], self.values.block[0])

    @property
    def step(self) -> int:
        """Number of tokens that are quantized at a time."""
        return self.block * -(-AT_ONCE // self.block) if self.last else self.block

    def quantized(self, tokens: int) -> int:
        """Return how many of ``tokens`` tokens are quantized, if none was ever removed."""
        return max(tokens - self.first - self.last, 0) // self.step * self.step


@functools.cache
def _parsed(name: str) -> CacheFormat:
    if name == FLOAT:
        unused = _weight_only("int8")
        return CacheFormat(keys=unused, values=unused, last=sys.maxsize)
    match = re.fullmatch(r"([\w-]+)(?::([\w-]+))?(?:\+first(\d{1,9}))?(?:\+last(\d{1,9}))?", str(name))
    if match is None:
        raise SchemeError(
            f"cache format {name!r}: write KEYS[:VALUES][+first<N>][+last<N>] with names of schemes, e.g. int8, "
            f"int4-g32+last64, int2-b32x1:int2-g32+first4+last32; or float"
        )
    keys, values, first, last = match.groups()
    try:
        formats = [_weight_only(each) for each in (keys, values or keys)]
        return CacheFormat(keys=formats[0], values=formats[1], first=int(first or 0), last=int(last or 0))
    except SchemeError as error:
        raise SchemeError(f"cache format {name!r}: {error}") from error


def _weight_only(scheme: str) -> Format:
    found = preset(scheme)
    if found.act:
        raise SchemeError(
            f"{scheme} rounds the inputs of products, which a cache does not have; take a weight-only scheme, such as "
            "fp8-wo, mxfp4-wo or int8"
        )
    return found.weight


def cache_format(name: str | CacheFormat) -> CacheFormat:
    """Return the format called ``name``; SchemeError if there is none."""
    return name if isinstance(name, CacheFormat) else _parsed(name)
