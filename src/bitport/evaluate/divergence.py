"""KL divergence and top-1 agreement between the predictions of two models, token by token.

    KL(P || Q) = sum over the vocabulary of p (log p - log q), in nats; P: the original's distribution of the next token

It is 0 if both distributions are equal, and depends on every token of the vocabulary, not only the one that follows in
the text: a model can keep its perplexity and still answer differently. Top-1 agreement is the fraction of tokens for
which both models rank the same token first.

Terms are computed by :func:`bitport.numerics.kl_terms`, in float32 (float64 if the logits have it). CHUNK logits are
processed at a time, so memory does not grow with the text.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from bitport.errors import ArgumentError
from bitport.evaluate.perplexity import predictions
from bitport.numerics import kl_terms

CHUNK = 1 << 21
"""Logits of one model that are processed at once: 8 MiB in float32, and some eight times that for intermediates."""


@dataclasses.dataclass(frozen=True)
class Divergence:
    """How far the predictions of a model are from those of the original: KL(original, model) in nats per token."""

    kl: float
    """Mean."""
    kl_p99: float
    """99th percentile: one token in a hundred is further away."""
    kl_max: float
    top1: float
    """Top-1 agreement, as a fraction of the tokens."""
    tokens: int


def divergence(
    original: Callable[[Tensor], Any],
    other: Callable[[Tensor], Any],
    tokens: Tensor,
    *,
    window: int = 512,
    stride: int | None = None,
    batch: int = 1,
) -> Divergence:
    """Compare ``other`` with ``original``, models as :func:`perplexity` takes them and both in memory, on the tokens
    that it scores. The logits of at most ``batch`` windows of each are held at a time.
    (:mod:`bitport.evaluate.directories` holds one model at a time.)"""
    mine, theirs = (predictions(each, tokens, window=window, stride=stride, batch=batch) for each in (original, other))
    return summarized(token_divergence(p, q) for (p, _), (q, _) in zip(mine, theirs, strict=True))


@torch.no_grad()
def token_divergence(original: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Compare logits [t, vocabulary]: return KL(original || other), float64 [t], and whether the largest agree, bool
    [t], both on the CPU."""
    if original.shape != other.shape or original.dim() != 2:
        raise ArgumentError(
            f"logits of shapes {list(original.shape)} and {list(other.shape)} cannot be compared: the models must "
            f"have one vocabulary"
        )
    dtype = torch.promote_types(torch.promote_types(original.dtype, other.dtype), torch.float32)
    rows = max(1, CHUNK // max(original.shape[-1], 1))
    kl, agree = [], []
    for mine, theirs in zip(original.split(rows), other.to(original.device).split(rows), strict=True):
        kl.append(kl_terms(mine.to(dtype).log_softmax(-1), theirs.to(dtype).log_softmax(-1)).sum(-1).cpu().double())
        agree.append((mine.argmax(-1) == theirs.argmax(-1)).cpu())
    if not kl:
        return torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.bool)
    return torch.cat(kl), torch.cat(agree)


def summarized(parts: Iterable[tuple[Tensor, Tensor]]) -> Divergence:
    """Summarize the results of :func:`token_divergence` for the parts of a text."""
    kls, agreements = zip(*parts, strict=True)
    kl, agree = torch.cat(kls), torch.cat(agreements)
    return Divergence(float(kl.mean()), percentile(kl, 0.99), float(kl.max()), float(agree.double().mean()), kl.numel())


def percentile(values: Tensor, part: float) -> float:
    """Return the smallest of ``values`` that is at least as large as a fraction ``part`` of them (torch.quantile takes
    at most 16 million)."""
    return float(values.kthvalue(max(1, math.ceil(part * values.numel()))).values)
