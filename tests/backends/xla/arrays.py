"""The arguments of an op's sample as JAX arrays, and how far a result is from its budget."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from bitport import layouts
from bitport.backends.xla.decode import native
from bitport.backends.xla.k_major import NAME
from bitport.backends.xla.move import op_arrays, to_tensor
from bitport.ops import Op, Sample, Weight

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def samples_of(op: Op, dtype: torch.dtype) -> Iterator[tuple[Sample, tuple[Any, ...]]]:
    """Samples with their arguments as arrays; those of many rows also in the k_major layout, with int4 in both of its
    forms. Arrays have no strides, so inputs that differ only in strides are left out."""
    at = weight_at(op)
    for sample in op.samples(CPU, dtype):
        if sample.name.endswith(("-strided", "-every-other")):
            continue
        if op.name == "repack":
            if sample.args[-1] in ("plain", NAME):
                yield sample, op_arrays(op, sample.args)
            continue
        yield sample, op_arrays(op, sample.args)
        if at is not None and not sample.name.endswith(("-vector", "-row", "-batch", "-empty", "-scalar", "-rest")):
            weight = Weight(*sample.args[at : at + 10])
            if layouts.layout(NAME).refuses(weight.matrix, weight.parts) is None:
                args = (*sample.args[:at], *weight.to_layout(NAME), *sample.args[at + 10 :])
                given = op_arrays(op, args)
                yield sample, given
                if weight.dtype == "int4":
                    yield sample, (*given[:at], native(given[at]), *given[at + 1 :])


def weight_at(op: Op) -> int | None:
    names = list(op.arguments)
    return names.index("data") if "layout" in names else None


def shortfall(sample: Sample, got: Any, dtype: torch.dtype) -> float:
    """dB by which a result misses its budget; bytes (an infinite budget) must be equal."""
    if isinstance(got, list):
        return -sample.judged([to_tensor(part) for part in got])[1]
    result = to_tensor(got)
    assert result.dtype == dtype
    assert result.shape == sample.expected().shape
    over = sample.judged(result)[1]
    return math.inf if math.isnan(over) else -over
