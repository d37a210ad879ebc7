"""Products to test kernels with: a weight in a kernel's layout, every kind of input, and the float64 result."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from bitport.numerics import fake_quantize, quantize
from bitport.ops import Sample, Weight, samples
from bitport.ops.reference import value_of
from bitport.schemes import Scheme, preset

CPU = torch.device("cpu")


def products(
    scheme: str | Scheme, dtype: torch.dtype, layout: str, n: int, k: int, m: int | None = None, with_bias: bool = True
) -> Iterator[Sample]:
    """One sample per kind of input, or one with ``m`` rows."""
    called, scheme = scheme, preset(scheme) if isinstance(scheme, str) else scheme
    parts = quantize(samples.values(CPU, dtype, n, k), scheme.weight)
    weight = Weight.of(parts, scheme.weight, n, k).to_layout(layout)
    value = value_of(parts, *weight.matrix)
    bias = samples.bias(CPU, dtype, n) if with_bias else None
    every = samples.inputs(CPU, dtype, k) if m is None else [(f"{m}-rows", samples.rows(CPU, dtype, m, k))]
    for name, x in every:
        scale = samples.act_scale(x, scheme)
        used = fake_quantize(x, scheme.act, scale) if scheme.act else x
        rest = (scheme.act, scale, bias) if scheme.act else (bias,)

        def expected(used: torch.Tensor = used) -> torch.Tensor:
            return F.linear(used.double(), value, None if bias is None else bias.double())

        budget = samples.product_budget(dtype, k, used.numel() // k * n)
        yield Sample(f"{called}-{name}", (x, *weight, *rest), expected, budget)


def shortfall(sample: Sample, got: torch.Tensor) -> float:
    """dB by which a result misses its budget; negative where it is better."""
    assert got.shape == sample.expected().shape
    assert got.is_contiguous()
    over = sample.judged(got)[1]
    return math.inf if math.isnan(over) else -over
