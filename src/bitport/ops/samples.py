"""Sample inputs of ops and error budgets of their results, shared by tests, conformance and docs.

Budgets are derived. Rounding to p bits of significand (bf16: 8, fp16: 11, fp32: 24) has a relative error of at most
2^-p, so one rounding has an SQNR of at least 6.02 p dB. A matmul has exact factors and three random, independent error
sources: the weight rounded to the result's dtype, the result rounded to it (each 2^-p / sqrt(3) * 0.72, root mean
square over a binade), and a float32 sum of K terms, whose roundings are a random walk: K times the power for p = 24.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from bitport.numerics import quantize, static_scale
from bitport.ops.reference import value_of
from bitport.ops.weight import Weight
from bitport.schemes import PRESETS, Scheme, preset

SIGNIFICAND = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}

VARIANTS = (
    "int6-g32",
    "int4-g32",
    "int4-g32-sym",
    "int4-g32-fzero",
    "int3-channel-sym",
    "int5-tensor",
    "int8-asym",
    "int4-b8x16-sym",
    "mxfp4-wo",
    "nvfp4-wo",
    "int4-int8-g32-asym",
    "fp8-static",
    "nvfp4-static",
)
"""Presets with suffixes, so that samples cover every granularity, kind of zero and scale, and static scales."""

SHAPES = {
    "int3": (24, 40),
    "int5": (20, 72),
    "mxfp8": (24, 96),
    "nvfp4": (17, 80),
    "fp8-block": (160, 200),
    "int4-g32-sym": (24, 72),
    "int4-b8x16": (24, 72),
    "int4": (40, 128),
    "nf4": (40, 128),
}
"""[N, K] by prefix of the scheme's name (the first match wins) where the default (24, 72), whose K is no multiple of a
group, is unsuitable."""

LARGE = (136, 384)
LARGE_ROWS = 67
"""More than one tile of most kernels in each dimension, so that interior tiles are covered too."""

WHOLE = (128, 256)
"""For kernels and layouts that take only whole tiles, which none of the other sizes are."""

ODD = (37, 77)
"""Odd in both dimensions. The weights are as small as SMALL, which float16 would flush to zero, and inputs of them so
much larger; this finds kernels that compute with the scales or inputs of bfloat16 in float16."""

SMALL = 2.0**-30


def sized(x: Tensor, factor: float) -> Tensor:
    """x times a power of two, but not in float16, which has no room for it."""
    return x if x.dtype == torch.float16 else x * factor


class WeightSample(NamedTuple):
    name: str
    scheme: Scheme
    weight: Weight
    value: Tensor
    """float64 on the CPU, from bitport.ops.reference."""


def rounding_budget(dtype: torch.dtype) -> float:
    """Least SQNR in dB of one rounding to ``dtype``."""
    return 6.02 * SIGNIFICAND[dtype]


def product_budget(dtype: torch.dtype, k: int, count: int) -> float:
    """Least SQNR in dB of ``count`` results, each a sum over ``k``. The power of the error and that of the result are
    both sums of ``count`` random squares; their ratio in dB has a standard deviation of 4.34 sqrt(4 / count), and three
    of these are allowed for."""
    noise = (0.72**2 / 3) * (2 * 4.0 ** -SIGNIFICAND[dtype] + k * 4.0**-24)
    return -10 * math.log10(noise) - 3 * 4.34 * math.sqrt(4 / max(count, 1))


def independent(m: int, n: int) -> int:
    """How many of m x n results count as having independent errors. The rounding error of a weight is the same in every
    row, so of many rows only one counts."""
    return n if m >= LARGE_ROWS else m * n


def rows_apart(x: Tensor) -> int:
    """Number of distinct rows of x: along a stride of 0 they repeat."""
    return math.prod(size for size, stride in zip(x.shape[:-1], x.stride(), strict=False) if stride)


def generator(*key: object) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def values(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return (torch.randn(*shape, generator=generator(shape)) * 0.2).to(device, dtype)


def rows(device: torch.device, dtype: torch.dtype, m: int, k: int) -> Tensor:
    return torch.randn(m, k, generator=generator(m, k)).to(device, dtype)


def rows_for(device: torch.device, dtype: torch.dtype, m: int, weight: Weight) -> Tensor:
    """Rows for a weight of :func:`weights`: the products are of an ordinary size."""
    x = rows(device, dtype, m, weight.k)
    return sized(x, 1 / SMALL) if (weight.n, weight.k) == ODD else x


def bias(device: torch.device, dtype: torch.dtype, n: int, kind: str = "") -> Tensor | None:
    """The bias for inputs of this kind: None for those with small or large results, of another dtype than the input for
    "rows", behind others and not contiguous for "strided"."""
    value = torch.randn(n, generator=generator(n))
    if kind == "rows":  # values that every dtype represents
        return value.bfloat16().to(device, torch.bfloat16 if dtype == torch.float32 else torch.float32)
    if kind in ("row", "every-other"):
        return None
    value = value.to(device, dtype)
    return torch.stack([value + 1, value], -1)[:, 1] if kind == "strided" else value


def act_scale(x: Tensor, scheme: Scheme) -> Tensor | None:
    """A static scale, if the scheme has one: smaller than the measured one, so that the largest values saturate."""
    if not scheme.static:
        return None
    amax = x.float().abs().amax() if x.numel() else torch.ones((), device=x.device)
    return static_scale(0.75 * amax, scheme.act)


def weights(
    device: torch.device,
    dtype: torch.dtype,
    *,
    weight_only: bool | None = None,
    experts: int = 0,
    large: bool = False,
) -> Iterator[WeightSample]:
    """One quantized weight per scheme, or per weight format if inputs do not matter (``weight_only`` None); if
    ``large``, three, of the sizes LARGE, WHOLE and ODD."""
    formats = set()
    for name in (*PRESETS, *VARIANTS):
        scheme = preset(name)
        if (weight_only is None and scheme.weight in formats) or bool(scheme.act) == weight_only:
            continue
        formats.add(scheme.weight)
        small = next((shape for start, shape in SHAPES.items() if name.startswith(start)), (24, 72))
        batch = (experts,) if experts else ()
        for n, k in (LARGE, WHOLE, ODD) if large else (small,):
            value = values(device, dtype, *batch, n, k)
            parts = quantize(sized(value, SMALL) if (n, k) == ODD else value, scheme.weight)
            weight = Weight.of(parts, scheme.weight, n, k)
            size = {WHOLE: "-whole", ODD: "-odd"}.get((n, k), "")
            yield WeightSample(name + size, scheme, weight, value_of(parts, *weight.matrix))


def apart(weight: Weight) -> Weight:
    """The same weight with non-contiguous rows that start behind other numbers, like columns sliced from a plain
    weight; float zeros in float32, whatever the dtype of the scale."""
    zero = weight.zero
    if zero is not None:
        zero = _behind(zero.float() if zero.is_floating_point() else zero)
    return weight._replace(data=_behind(weight.data), scale=_behind(weight.scale), zero=zero)


def wider(weight: Weight) -> Weight:
    """The same weight with scales of 16 bits in float32, as those of a weight that was quantized in another dtype than
    its inputs have."""
    return weight._replace(scale=weight.scale.float()) if weight.scale.dtype.itemsize == 2 else weight


def _behind(part: Tensor) -> Tensor:
    """``part`` as the right half of a matrix."""
    raw = part.contiguous().view(torch.uint8)
    return torch.cat([raw ^ 1, raw], -1)[..., raw.shape[-1] :].view(part.dtype)


def inputs(device: torch.device, dtype: torch.dtype, k: int) -> Iterator[tuple[str, Tensor]]:
    """Every kind of input: one row, many, four dimensions with a row of zeros like padding, empty, non-contiguous. The
    single row is large and starts behind another number; "every-other" is small."""
    yield "vector", rows(device, dtype, 1, k)[0]
    yield "row", sized(rows(device, dtype, 1, k + 1), 1 / SMALL)[:, 1:]
    yield "rows", rows(device, dtype, 5, k)
    batch = rows(device, dtype, 6, k).reshape(2, 1, 3, k)
    batch[0, 0, 0] = 0
    yield "batch", batch
    yield "empty", rows(device, dtype, 0, k)
    yield "strided", rows(device, dtype, k, 4).t()
    yield "every-other", sized(rows(device, dtype, 3, 2 * k), SMALL)[:, 1::2]


def with_nan(device: torch.device, dtype: torch.dtype, k: int) -> Tensor:
    """Three rows, each expanded to two without a copy; a NaN in the second must not affect the others."""
    x = rows(device, dtype, 3, k)
    x[1, k // 2] = math.nan
    return x[:, None].expand(3, 2, k)


def edges(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Matrices of numbers that are easily rounded in the wrong way. "edges", by row: zeros; numbers halfway between two
    codes of int4, int8 and float4, whose scale is 1; very small ones. "not-finite": a NaN and an infinity, each in a
    row of its own. They are column-major."""
    k = 96
    at, x = torch.arange(k), torch.randn(8, k, generator=generator("edges"))
    x[0], x[5] = 0, x[5] * (2.0**-12 if dtype == torch.float16 else 2.0**-100)
    x[1], x[2], x[3] = at % 16 - 7.5, at - 47.5, (at % 49 - 24) / 4
    x[2, 0] = 127
    bad = torch.randn(5, k, generator=generator("not-finite"))
    bad[1, 7], bad[3, 70] = math.nan, -math.inf
    yield "edges", by_columns(x.to(device, dtype))
    yield "not-finite", by_columns(bad.to(device, dtype))


def by_columns(x: Tensor) -> Tensor:
    """The same matrix in column-major order: the numbers of a row lie apart."""
    return x.t().contiguous().t()
