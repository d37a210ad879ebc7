"""Inputs to try ops with, and what their results may be off by. Tests, conformance and docs read them from here.

Budgets are derived. Rounding to p bits of significand (bf16: 8, fp16: 11, fp32: 24) is off by at most 2^-p of the
value, so one rounding has an SQNR of at least 6.02 p dB. A product has exact factors and three sources of error, random
and independent: the weight rounded to the result's dtype, the result rounded to it (each 2^-p / sqrt(3) * 0.72, root
mean square over a binade), and a float32 sum of K terms, whose roundings walk: K times that of p = 24.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from bitport.numerics import quantize, static_scale
from bitport.numerics.packing import as_bytes
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
"""Presets with suffixes, so that every granularity, kind of zero and scale, and fixed scale is among the samples."""

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
"""[N, K] per first letters of the scheme where the ordinary (24, 72), whose K is no multiple of a group, won't do;
the first that fits counts."""

LARGE = (136, 384)
LARGE_ROWS = 67
"""More than one tile of most kernels each way, so that what they do between the borders is tried too."""


class WeightSample(NamedTuple):
    name: str
    scheme: Scheme
    weight: Weight
    value: Tensor
    """float64 on the CPU, from the judge."""


def rounding_budget(dtype: torch.dtype) -> float:
    """Least SQNR in dB of one rounding to ``dtype``."""
    return 6.02 * SIGNIFICAND[dtype]


def product_budget(dtype: torch.dtype, k: int, count: int) -> float:
    """Least SQNR in dB of ``count`` results, each a sum over ``k``. The power of the error and that of the result are
    both sums of ``count`` random squares; their ratio in dB spreads by 4.34 sqrt(4 / count), and three times that is
    allowed for."""
    noise = (0.72**2 / 3) * (2 * 4.0 ** -SIGNIFICAND[dtype] + k * 4.0**-24)
    return -10 * math.log10(noise) - 3 * 4.34 * math.sqrt(4 / max(count, 1))


def independent(m: int, n: int) -> int:
    """How many of m x n results are off at random. A weight is off by the same in each row: of many rows, those of
    one."""
    return n if m >= LARGE_ROWS else m * n


def rows_apart(x: Tensor) -> int:
    """How many rows of x are others than those before: along a stride of 0 they are the same."""
    return math.prod(size for size, stride in zip(x.shape[:-1], x.stride(), strict=False) if stride)


def generator(*key: object) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def values(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return (torch.randn(*shape, generator=generator(shape)) * 0.2).to(device, dtype)


def rows(device: torch.device, dtype: torch.dtype, m: int, k: int) -> Tensor:
    return torch.randn(m, k, generator=generator(m, k)).to(device, dtype)


def bias(device: torch.device, dtype: torch.dtype, n: int, kind: str = "") -> Tensor | None:
    """That of an input of this kind: none for one row, and for many in another dtype than theirs."""
    value = torch.randn(n, generator=generator(n))
    if kind == "rows":  # numbers that every dtype has
        return value.bfloat16().to(device, torch.bfloat16 if dtype == torch.float32 else torch.float32)
    return None if kind == "row" else value.to(device, dtype)


def act_scale(x: Tensor, scheme: Scheme) -> Tensor | None:
    """A static scale, where the scheme wants one: not what would be measured, so that the largest of x saturate."""
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
    """One quantized weight per scheme, or, where the inputs do not matter (None), per format of weights."""
    formats = set()
    for name in (*PRESETS, *VARIANTS):
        scheme = preset(name)
        if (weight_only is None and scheme.weight in formats) or bool(scheme.act) == weight_only:
            continue
        formats.add(scheme.weight)
        n, k = next((shape for start, shape in SHAPES.items() if name.startswith(start)), (24, 72))
        n, k = LARGE if large else (n, k)
        batch = (experts,) if experts else ()
        parts = quantize(values(device, dtype, *batch, n, k), scheme.weight)
        weight = Weight(*parts, scheme.weight.dtype, n, k, *scheme.weight.block_shape(n, k), "plain")
        value = value_of(parts, *weight.matrix)
        yield WeightSample(name, scheme, weight, value)


def apart(weight: Weight) -> Weight:
    """The same numbers in rows that do not lie together, as in columns that were cut out of a plain weight; zeros that
    are floats in float32, whatever the scale has."""
    zero = None if weight.zero is None else _wider(weight.zero)
    if zero is not None and zero.is_floating_point():
        zero = zero.float()
    return weight._replace(data=_wider(weight.data), scale=_wider(weight.scale), zero=zero)


def _wider(part: Tensor) -> Tensor:
    raw = as_bytes(part)
    return torch.cat([raw, raw], -1)[..., : raw.shape[-1]].view(part.dtype)


def inputs(device: torch.device, dtype: torch.dtype, k: int) -> Iterator[tuple[str, Tensor]]:
    """Every way an input may come: one row, many, in four dimensions with a row of zeros as of padding, empty, not
    contiguous."""
    yield "vector", rows(device, dtype, 1, k)[0]
    yield "row", rows(device, dtype, 1, k)
    yield "rows", rows(device, dtype, 5, k)
    batch = rows(device, dtype, 6, k).reshape(2, 1, 3, k)
    batch[0, 0, 0] = 0
    yield "batch", batch
    yield "empty", rows(device, dtype, 0, k)
    yield "strided", rows(device, dtype, k, 4).t()
    yield "every-other", rows(device, dtype, 3, 2 * k)[:, 1::2]


def with_nan(device: torch.device, dtype: torch.dtype, k: int) -> Tensor:
    """Three rows, each of them twice in memory that it has once: what is no number in the second stays there."""
    x = rows(device, dtype, 3, k)
    x[1, k // 2] = math.nan
    return x[:, None].expand(3, 2, k)
