"""How far the predictions of one model are from those of another, token by token.

    KL(P || Q) = sum over the vocabulary of p (log p - log q), in nats; P: the original's distribution of the next token

It is 0 where both say the same, and counts every token of the vocabulary, not only the one that the text goes on with:
a model can keep its perplexity and still answer differently. Top-1 agreement is the part of the tokens for which both
find the same token the most likely.

With d = log q - log p a term is computed as p (e^d - 1 - d), which adds q - p to it: these add up to 0, as both
distributions to 1, but now no term is negative, nothing cancels, and an error of the normalizer counts only squared. So
float32 is enough (float64 where the logits are), and a KL of 1e-6 is still right. It is done for CHUNK logits at a
time: memory does not grow with the text.
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

CHUNK = 1 << 21
"""Logits of one model that are worked on at once: 8 MiB in float32, and some eight times that for what is computed."""


@dataclasses.dataclass(frozen=True)
class Divergence:
    """KL in nats per token."""

    kl: float
    """Mean."""
    kl_p99: float
    """99th percentile: a hundredth of the tokens is further away."""
    kl_max: float
    top1: float
    """Part of the tokens, 0 to 1."""
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
    """How far ``other`` is from ``original``, models as :func:`perplexity` takes them, both in memory, on the tokens
    that it scores, batch by batch: the logits of no more than ``batch`` windows of each are held.
    (:mod:`bitport.evaluate.directories` holds one model at a time.)"""
    mine, theirs = (predictions(each, tokens, window=window, stride=stride, batch=batch) for each in (original, other))
    return summarized(token_divergence(p, q) for (p, _), (q, _) in zip(mine, theirs, strict=True))


@torch.no_grad()
def token_divergence(original: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [t, vocabulary] of both -> (KL(original || other) float64 [t], whether the largest agree bool [t]); on
    the CPU."""
    if original.shape != other.shape or original.dim() != 2:
        raise ArgumentError(
            f"logits of shapes {list(original.shape)} and {list(other.shape)} cannot be compared: the models must "
            f"have one vocabulary"
        )
    dtype = torch.promote_types(torch.promote_types(original.dtype, other.dtype), torch.float32)
    rows = max(1, CHUNK // max(original.shape[-1], 1))
    kl, agree = [], []
    for mine, theirs in zip(original.split(rows), other.to(original.device).split(rows), strict=True):
        kl.append(_terms(mine.to(dtype).log_softmax(-1), theirs.to(dtype).log_softmax(-1)).sum(-1).cpu().double())
        agree.append((mine.argmax(-1) == theirs.argmax(-1)).cpu())
    if not kl:
        return torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.bool)
    return torch.cat(kl), torch.cat(agree)


def _terms(log_p: Tensor, log_q: Tensor) -> Tensor:
    """p (e^d - 1 - d); as q - p (1 + d) where e^d is large, and q where p is 0."""
    p, q, d = log_p.exp(), log_q.exp(), log_q - log_p
    terms = torch.where(d < 1, p * (torch.expm1(d) - d), q - p * (1 + d))
    return torch.where(p > 0, terms, q)


def summarized(parts: Iterable[tuple[Tensor, Tensor]]) -> Divergence:
    """One divergence from what :func:`token_divergence` gave for the parts of a text."""
    kls, agreements = zip(*parts, strict=True)
    kl, agree = torch.cat(kls), torch.cat(agreements)
    return Divergence(float(kl.mean()), percentile(kl, 0.99), float(kl.max()), float(agree.double().mean()), kl.numel())


def percentile(values: Tensor, part: float) -> float:
    """The smallest of ``values`` that is no less than ``part`` of them (torch.quantile takes 16 million at most)."""
    return float(values.kthvalue(max(1, math.ceil(part * values.numel()))).values)
