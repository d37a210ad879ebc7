"""grouped_linear and dyn_grouped_linear: multiply each expert's rows by its quantized weight.

Rows of x are sorted by expert: expert e has rows ``ends[e-1] .. ends[e]`` (int32 [E], as in ``torch._grouped_mm``).
Rows past the last end belong to no expert and give zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bitport.errors import ArgumentError
from bitport.numerics import fake_quantize
from bitport.ops import samples
from bitport.ops.linear import check_activation, check_linear, dense_linear
from bitport.ops.select import declare
from bitport.ops.table import Op, Sample
from bitport.ops.weight import SCHEMA, Weight, check_weight


def _check(x: Tensor, ends: Tensor, *rest: Any) -> None:
    weight = Weight(*rest[:10])
    check_linear(x, weight.data, weight.n, weight.k, None)
    check_weight(*weight)
    if x.dim() != 2:
        raise ArgumentError(f"grouped x must be [rows, {weight.k}], not {[*x.shape]}")
    if len(weight.batch) != 1:
        raise ArgumentError(
            f"a grouped product needs one weight per expert [E, N, K], not a batch of {[*weight.batch]}"
        )
    if ends.dtype != torch.int32 or ends.shape != weight.batch or ends.device != x.device:
        raise ArgumentError(
            f"ends must be int32 {[*weight.batch]} on {x.device}, not {ends.dtype} {[*ends.shape]} on {ends.device}"
        )
    if len(rest) > 10:
        check_activation(x, rest[10], None)


def _generic(x: Tensor, ends: Tensor, *rest: Any) -> Tensor:
    return _by_expert(x, ends, Weight(*rest))


def _generic_dyn(x: Tensor, ends: Tensor, *rest: Any) -> Tensor:
    """Like dyn_linear: both factors in float32, the result rounded to x's dtype."""
    *weight, act = rest
    return _by_expert(fake_quantize(x, act), ends, Weight(*weight)).to(x.dtype)


def _by_expert(x: Tensor, ends: Tensor, weight: Weight) -> Tensor:
    """Only the weights of experts that have rows are dequantized, one at a time."""
    y = x.new_zeros(x.shape[0], weight.n)
    for expert, own in spans(ends, x.shape[0]):
        if own.stop > own.start:
            parts = (None if part is None else part[expert] for part in weight.parts)
            y[own] = dense_linear(x[own], Weight(*parts, *weight[4:]), None)  # type: ignore[arg-type, call-arg]
    return y


def spans(ends: Tensor, rows: int) -> Iterator[tuple[int, slice]]:
    """Yield (expert, its rows), those without rows too. ArgumentError if ``ends`` decrease or exceed ``rows``."""
    bounds = ends.tolist()
    for expert, (start, end) in enumerate(itertools.pairwise([0, *bounds])):
        if not start <= end <= rows:
            raise ArgumentError(f"ends must grow from 0 to at most {rows} rows, not {bounds}")
        yield expert, slice(start, end)


def masked(x: Tensor, ends: Tensor, dense: Tensor) -> Tensor:
    """The product with ``dense`` [E, N, K], without reading ``ends`` on the host: every expert computes every row, and
    a mask selects."""
    expert = torch.searchsorted(ends, torch.arange(x.shape[0], device=x.device, dtype=ends.dtype), right=True)
    y = x.new_zeros(x.shape[0], dense.shape[-2])
    for at in range(dense.shape[0]):
        y = torch.where((expert == at)[:, None], x @ dense[at].T, y)
    return y


def _traced(x: Tensor, ends: Tensor, *rest: Any) -> Tensor:
    return masked(x, ends, Weight(*rest).dense(x.dtype))


def _traced_dyn(x: Tensor, ends: Tensor, *rest: Any) -> Tensor:
    *weight, act = rest
    return masked(fake_quantize(x, act), ends, Weight(*weight).dense(torch.float32)).to(x.dtype)


def _fake(x: Tensor, ends: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape[0], rest[5])


def _backward(grad: Tensor, x: Tensor, ends: Tensor, *rest: Any) -> Tensor:
    dense = torch.ops.bitport.dequantize(*rest[:10], grad.dtype)
    return masked(grad, ends, dense.transpose(-1, -2))


def _samples(device: torch.device, dtype: torch.dtype, weight_only: bool) -> Iterator[Sample]:
    for experts, kinds in ((3, FEW), (2, LARGE)):
        for sample in samples.weights(device, dtype, weight_only=weight_only, experts=experts, large=kinds is LARGE):
            if not sample.scheme.static:
                for kind in kinds:
                    yield _sample(sample, *kind, device, dtype)


Kind = tuple[str, int, tuple[int, ...]]
"""Name, rows and ends of a sample."""
FEW: tuple[Kind, ...] = (
    ("uneven", 7, (2, 2, 7)),
    ("rest", 7, (0, 3, 4)),
    ("empty", 7, (0, 0, 0)),
    ("no-rows", 0, (0, 0, 0)),
)
LARGE: tuple[Kind, ...] = (("large", samples.LARGE_ROWS, (20, samples.LARGE_ROWS)),)


def _sample(
    of: samples.WeightSample,
    kind: str,
    count: int,
    bounds: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
) -> Sample:
    act, weight = of.scheme.act, samples.wider(of.weight) if kind == "uneven" else of.weight
    x = samples.rows_for(device, dtype, count, weight)
    if kind == "rest":
        x, weight = samples.by_columns(x), samples.apart(weight)
    ends = torch.tensor(bounds, dtype=torch.int32, device=device)
    rounded = fake_quantize(x, act) if act else x

    def expected() -> Tensor:
        return masked(rounded.cpu().double(), ends.cpu(), of.value)

    args = (x, ends, *weight, *([act] if act else []))
    budget = samples.product_budget(dtype, of.weight.k, samples.independent(bounds[-1], of.weight.n))
    return Sample(f"{of.name}-{kind}", args, expected, budget)


GROUPED_LINEAR = Op(
    "grouped_linear",
    f"(Tensor x, Tensor ends, {SCHEMA}) -> Tensor",
    check=_check,
    generic=_generic,
    fake=_fake,
    samples=lambda device, dtype: _samples(device, dtype, True),
    backward=_backward,
    decomposition=_traced,
)

DYN_GROUPED_LINEAR = Op(
    "dyn_grouped_linear",
    f"(Tensor x, Tensor ends, {SCHEMA}, str act) -> Tensor",
    check=_check,
    generic=_generic_dyn,
    fake=_fake,
    samples=lambda device, dtype: _samples(device, dtype, False),
    backward=_backward,
    decomposition=_traced_dyn,
)

declare(GROUPED_LINEAR)
declare(DYN_GROUPED_LINEAR)
