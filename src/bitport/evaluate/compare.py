"""One model under many schemes: the rows of the tables in the demo and in docs/accuracy.md."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from bitport.api import quantize_
from bitport.evaluate.measure import kernels_of, size_of
from bitport.evaluate.perplexity import token_losses
from bitport.integrations.huggingface import logits_of
from bitport.schemes import preset

BASELINE = "bf16"


@dataclasses.dataclass(frozen=True)
class Row:
    scheme: str
    nbytes: int
    bits_per_weight: float
    """Over all parameters, those that stay in bf16 too."""
    perplexity: float
    change_percent: float
    """Of the perplexity, against the unquantized model."""
    kernel: str
    """Of one-row products, the decoding of one token."""


def quantized(base: Any, scheme: str, calibrate: Callable[[Any], Any]) -> Any:
    """A copy of ``base`` under ``scheme``, or as it is for :data:`BASELINE`."""
    model = copy.deepcopy(base)
    if scheme != BASELINE:
        quantize_(model, scheme, calibrate=calibrate if preset(scheme).static else None, measure=False, progress=False)
    return model


def measure(model: Any, scheme: str, tokens: Tensor, window: int, base_nll: float | None) -> tuple[Row, float]:
    """The row of ``model`` and its mean negative log likelihood; ``base_nll`` is that of the unquantized model."""
    nll = float(token_losses(logits_of(model), tokens, window=window, batch=4).double().mean())
    measured = size_of(model)
    change = torch.tensor(nll - (nll if base_nll is None else base_nll)).double().expm1()
    row = Row(
        scheme,
        measured.nbytes,
        measured.bits_per_weight,
        float(torch.tensor(nll).double().exp()),
        100 * float(change),
        ", ".join(kernels_of(model)) or "torch",
    )
    return row, nll


def compare(
    base: Any, schemes: Iterable[str], tokens: Tensor, window: int, calibrate: Callable[[Any], Any]
) -> Iterable[tuple[Any, Row]]:
    """Each scheme's model and row, one at a time; the unquantized model is the first."""
    base_nll = None
    for scheme in (BASELINE, *schemes):
        model = quantized(base, scheme, calibrate)
        row, nll = measure(model, scheme, tokens, window, base_nll)
        base_nll = nll if base_nll is None else base_nll
        yield model, row
