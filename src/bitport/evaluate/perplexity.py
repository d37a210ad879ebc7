"""Perplexity of a text under a language model.

    perplexity = exp(mean over scored tokens of -log p(token | the tokens before it in its window))

The token ids t_0 .. t_{n-1} are cut into windows of ``window`` ids that start ``stride`` ids apart; the last one may be
shorter. A window scores those of its tokens that no earlier window has scored, except its first, which has no context.
So with stride < window every token but t_0 is scored once, each with at least window - stride tokens of context; with
stride == window (the default, and fastest) the first token of every window is not scored.

The log-softmax is computed in float32, or in float64 if the logits are; the mean is summed in float64.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bitport.errors import ArgumentError

MOST_NATS = 700
"""Largest mean loss whose exponential is finite in float64 (with some margin)."""


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """How well a model predicts a text: ``value`` is exp of the mean negative log likelihood of a token; lower is
    better."""

    value: float
    nll: float
    """Mean negative log likelihood, in nats per token: log(value)."""
    scored: int
    """Number of tokens in the mean."""


def perplexity(
    model: Callable[[Tensor], Any], tokens: Tensor, *, window: int = 512, stride: int | None = None, batch: int = 1
) -> Perplexity:
    """The perplexity of ``model`` on ``tokens``, read in windows, whose first tokens are not scored.

    ``model``: token ids [batch, length] -> logits [batch, length, vocabulary], or an object that has such
    ``logits``, as models of transformers return. ``tokens``: ids in one dimension. ``window``: tokens that the model
    sees at once.
    ``stride``: tokens from one window to the next (default: ``window``); with fewer, all tokens but
    the very first are scored, each with at least ``window`` - ``stride`` tokens of context.
    ``batch``: windows that run at once.
    """
    return summary(token_losses(model, tokens, window=window, stride=stride, batch=batch))


def summary(token_losses: Tensor) -> Perplexity:
    nll = float(token_losses.double().mean())
    return Perplexity(math.exp(nll) if nll < MOST_NATS else math.inf, nll, token_losses.numel())


@torch.no_grad()
def token_losses(
    model: Callable[[Tensor], Any], tokens: Tensor, *, window: int = 512, stride: int | None = None, batch: int = 1
) -> Tensor:
    """Return -log p of every scored token, in text order."""
    windows = predictions(model, tokens, window=window, stride=stride, batch=batch)
    return torch.cat([losses(predicted, wanted) for predicted, wanted in windows])


@torch.no_grad()
def predictions(
    model: Callable[[Tensor], Any], tokens: Tensor, *, window: int = 512, stride: int | None = None, batch: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for every window the logits [t, vocabulary] that predict its t scored tokens, and these tokens."""
    stride = window if stride is None else stride
    if not isinstance(tokens, Tensor) or tokens.dim() != 1 or tokens.numel() < 2:
        given = f"shape {list(tokens.shape)}" if isinstance(tokens, Tensor) else f"a {type(tokens).__name__}"
        raise ArgumentError(f"perplexity needs a tensor of at least two token ids in one dimension, not {given}")
    check_windows(window, stride, batch)
    spans = _windows(tokens.numel(), window, stride)
    for _, group in itertools.groupby(spans, key=lambda span: span[1] - span[0]):
        alike = list(group)
        for at in range(0, len(alike), batch):
            chunk = alike[at : at + batch]
            output = model(torch.stack([tokens[begin:end] for begin, end, _ in chunk]))
            output = getattr(output, "logits", output)
            if not isinstance(output, Tensor) or output.dim() != 3:
                raise ArgumentError(f"the model must give logits [batch, length, vocabulary], not {_shown(output)}")
            for row, (begin, end, first) in zip(output, chunk, strict=True):
                predicted = row[first - begin - 1 : end - begin - 1]  # position t predicts token begin + t + 1
                if not bool(predicted.amax(-1).isfinite().all()):  # single logits may be -inf: ruled-out tokens
                    raise ArgumentError(
                        f"the model's logits hold NaN or infinity for tokens {begin} to {end}: its perplexity is not "
                        f"defined"
                    )
                yield predicted, tokens[first:end]


def check_windows(window: int, stride: int | None, batch: int) -> None:
    stride = window if stride is None else stride
    if not 1 <= stride <= window or window < 2 or batch < 1:
        raise ArgumentError(
            f"window {window}, stride {stride}, batch {batch}: the window must be at least 2, the stride from 1 to the "
            f"window, the batch at least 1"
        )


def count_windows(n: int, window: int, stride: int | None) -> int:
    """Return how many windows :func:`predictions` makes of n tokens."""
    return sum(1 for _ in _windows(n, window, stride or window))


def scored_tokens(n: int, window: int, stride: int | None) -> int:
    """Return how many of n tokens are scored."""
    return sum(end - first for _, end, first in _windows(n, window, stride or window))


def losses(predicted: Tensor, wanted: Tensor) -> Tensor:
    """Return -log p of the tokens ``wanted`` under the logits ``predicted``, on the CPU."""
    exact = predicted.to(torch.promote_types(predicted.dtype, torch.float32))
    return F.cross_entropy(exact, wanted, reduction="none").cpu()


def _shown(output: Any) -> str:
    return f"shape {list(output.shape)}" if isinstance(output, Tensor) else type(output).__name__


def _windows(n: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, end, first scored token) of each window."""
    scored = 1
    for begin in range(0, n - 1, stride):
        if scored >= n:
            return
        end = min(begin + window, n)
        yield begin, end, max(scored, begin + 1)
        scored = end
