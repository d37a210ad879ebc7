"""Compare one model under many schemes: the rows of the tables in the demo and in docs/accuracy.md."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from bitport.api import quantize_
from bitport.evaluate.measure import kernels_of, size_of
from bitport.evaluate.perplexity import MOST_NATS, perplexity
from bitport.integrations.huggingface import logits_of
from bitport.schemes import preset

BASELINE = "bf16"


@dataclasses.dataclass(frozen=True)
class ComparisonRow:
    scheme: str
    nbytes: int
    bits_per_weight: float
    """Over all parameters, including those that stay in bf16."""
    perplexity: float
    change_percent: float
    """Change of the perplexity against the unquantized model."""
    kernel: str
    """The kernel for one row, as when decoding one token."""


def quantized(base: Any, scheme: str, batches: Sequence[Tensor]) -> Any:
    """Return a copy of ``base``, quantized to ``scheme`` unless that is :data:`BASELINE`. ``batches``: for schemes that
    are calibrated."""
    model = copy.deepcopy(base)
    if scheme != BASELINE:
        quantize_(model, scheme, calibrate=batches if preset(scheme).static else None, measure=False, progress=False)
    return model


def change_percent(nll: float, base: float) -> float:
    """Return the relative change of perplexity between two mean negative log likelihoods."""
    return 100 * math.expm1(nll - base) if nll - base < MOST_NATS else math.inf


def compare(
    base: Any, schemes: Iterable[str], tokens: Tensor, window: int, batches: Sequence[Tensor]
) -> Iterator[tuple[Any, ComparisonRow]]:
    """Yield the model and row of each scheme, one at a time, the unquantized model first."""
    base_nll = None
    for scheme in (BASELINE, *schemes):
        model = quantized(base, scheme, batches)
        result = perplexity(logits_of(model), tokens, window=window, batch=4)
        base_nll = result.nll if base_nll is None else base_nll
        measured = size_of(model)
        yield (
            model,
            ComparisonRow(
                scheme,
                measured.nbytes,
                measured.bits_per_weight,
                result.value,
                change_percent(result.nll, base_nll),
                ", ".join(kernels_of(model)) or "torch",
            ),
        )
