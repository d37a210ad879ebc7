"""Perplexity of a text under a language model.

    perplexity = exp(mean over scored tokens of -log p(token | the tokens before it in its window))

The token ids t_0 .. t_{n-1} are cut into windows of ``window`` ids that start ``stride`` ids apart; the last one may be
shorter. A window scores those of its tokens that no window before it has scored and that have a token before them in
it. So with stride < window every token but t_0 is scored once, each with at least window - stride tokens of context;
with stride == window (the default, the quickest) the first token of every window is left out.

The log-softmax is computed in float32, or in float64 where the logits are; the mean is summed in float64.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from bitport.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class Perplexity:
    value: float
    nll: float
    """Mean negative log likelihood, in nats per token: log(value)."""
    scored: int
    """Number of tokens in the mean."""


def perplexity(
    logits: Callable[[Tensor], Tensor], tokens: Tensor, *, window: int = 512, stride: int | None = None, batch: int = 1
) -> Perplexity:
    """``logits``: token ids [batch, length] -> [batch, length, vocabulary]. ``batch``: windows that run at once."""
    losses = token_losses(logits, tokens, window=window, stride=stride, batch=batch)
    nll = float(losses.double().mean())
    return Perplexity(math.exp(nll) if nll < 700 else math.inf, nll, losses.numel())


@torch.no_grad()
def token_losses(
    logits: Callable[[Tensor], Tensor], tokens: Tensor, *, window: int = 512, stride: int | None = None, batch: int = 1
) -> Tensor:
    """-log p of every scored token, in the order of the text."""
    stride = window if stride is None else stride
    if tokens.dim() != 1 or tokens.numel() < 2:
        raise ArgumentError(f"perplexity needs at least two token ids in one dimension, not shape {list(tokens.shape)}")
    if not 1 <= stride <= window or window < 2 or batch < 1:
        raise ArgumentError(
            f"window {window}, stride {stride}, batch {batch}: the window must be at least 2, the stride from 1 to the "
            f"window, the batch at least 1"
        )
    losses = []
    for _, group in itertools.groupby(_windows(tokens.numel(), window, stride), key=lambda span: span[1] - span[0]):
        spans = list(group)
        for at in range(0, len(spans), batch):
            chunk = spans[at : at + batch]
            output = logits(torch.stack([tokens[begin:end] for begin, end, _ in chunk]))
            losses += [_losses(row, tokens, *span) for row, span in zip(output, chunk, strict=True)]
    return torch.cat(losses)


def _windows(n: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, first scored token) of each window."""
    scored = 1
    for begin in range(0, n - 1, stride):
        if scored >= n:
            return
        end = min(begin + window, n)
        yield begin, end, max(scored, begin + 1)
        scored = end


def _losses(row: Tensor, tokens: Tensor, begin: int, end: int, first: int) -> Tensor:
    """Position t of ``row`` predicts token begin + t + 1."""
    predictions = row[first - begin - 1 : end - begin - 1]
    exact = predictions.to(torch.promote_types(predictions.dtype, torch.float32))
    losses = F.cross_entropy(exact, tokens[first:end], reduction="none")
    if bool(torch.isnan(losses).any()):
        raise ArgumentError(f"the model's logits hold NaN for tokens {begin} to {end}: its perplexity is not defined")
    return losses.cpu()
