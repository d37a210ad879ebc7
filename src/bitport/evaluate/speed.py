"""Measure the speed of a linear layer under a scheme against bfloat16, and the accuracy of its kernel."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bitport.evaluate.timing import clock_of, interleaved, medians, ratio, spread
from bitport.numerics import sqnr
from bitport.ops import decide
from bitport.ops.product import operand
from bitport.schemes import preset
from bitport.tensor import QTensor, quantize_tensor

BYTES = 128 << 20
"""Bytes of bf16 weights that each candidate cycles through, so that a small layer is not served from the caches."""

COPIES = 4096
"""Most weights that each candidate cycles through: a million tiny ones would take minutes and gigabytes to make."""

JUDGED = 16
"""Most rows on which accuracy is measured."""


@dataclasses.dataclass(frozen=True)
class Speed:
    k: int
    n: int
    rows: int
    scheme: str
    kernel: str
    bf16_ms: float
    ms: float
    speedup: float
    """Median over repetitions of the time of bf16 divided by that of the scheme."""
    noise: float
    """``timing.spread`` of these ratios."""
    sqnr_db: float
    """Against the float64 product with the quantized weight."""


def speeds(
    k: int, n: int, rows: Sequence[int], schemes: Sequence[str], *, device: torch.device, repetitions: int
) -> Iterator[Speed]:
    """Yield one result per number of rows and scheme, for a layer from k features to n."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(n, k, generator=generator) * 0.02).bfloat16().to(device)
    copies = min(max(2, BYTES // weight.nbytes), COPIES)
    dense = [weight.clone() for _ in range(copies)]
    quantized = {name: quantize_tensor(weight, preset(name)) for name in schemes}
    every: dict[str, list[Any]] = {
        name: [q.map_parts(torch.clone) for _ in range(copies)] for name, q in quantized.items()
    }
    for m in rows:
        x = torch.randn(m, k, generator=generator).bfloat16().to(device)
        with torch.inference_mode():
            candidates = {"": _turns(x, dense), **{name: _turns(x, each) for name, each in every.items()}}
            times = interleaved(candidates, repetitions=repetitions, seconds=0.02, clock=clock_of(device))
            middle = medians(times)
            for name, q in quantized.items():
                ratios = [base / mine for base, mine in zip(times[""], times[name], strict=True)]
                yield Speed(
                    k,
                    n,
                    m,
                    name,
                    kernel_for(q, x),
                    1e3 * middle[""],
                    1e3 * middle[name],
                    1 / ratio(times, name, ""),
                    spread(ratios),
                    _exactness(q, x[:JUDGED]),
                )


def _turns(x: Tensor, weights: Sequence[Tensor]) -> Callable[[], Tensor]:
    """Return a function that multiplies by the next weight at each call."""
    following = itertools.cycle(weights)
    return lambda: F.linear(x, next(following))


def kernel_for(q: QTensor, x: Tensor) -> str:
    """The kernel that computes ``F.linear(x, q)``."""
    if q.scheme.act:
        return decide("dyn_linear", x, *operand(q), q.scheme.act, q.act_scale, None).kernel
    return decide("linear", x, *operand(q), None).kernel


def _exactness(q: QTensor, x: Tensor) -> float:
    exact = x.cpu().double() @ q.dequantize(torch.float32).cpu().double().t()
    return float(sqnr(exact, F.linear(x, q).cpu()))
