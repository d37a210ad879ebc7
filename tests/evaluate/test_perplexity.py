"""Perplexity against a reference that scores one token at a time in Python floats."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitport.errors import ArgumentError
from bitport.evaluate import perplexity
from bitport.evaluate.compare import change_percent
from bitport.evaluate.perplexity import token_losses

VOCABULARY = 7


def context_logits(ids: Tensor) -> Tensor:
    """Logits that depend on the whole prefix: token v gets sin(v * (1 + sum of the ids so far))."""
    totals = 1.0 + ids.double().cumsum(-1)
    return torch.sin(totals[..., None] * torch.arange(VOCABULARY, dtype=torch.float64))


def judged(tokens: list[int], window: int, stride: int) -> list[float]:
    """The definition: each token is scored in the first window that contains it and a token before it."""
    losses = []
    for t in range(1, len(tokens)):
        start = next(s for s in range(0, len(tokens), stride) if s <= t < s + window)
        if start == t:
            continue
        total = 1.0 + sum(tokens[start:t])
        scores = [math.sin(total * v) for v in range(VOCABULARY)]
        losses.append(math.log(sum(map(math.exp, scores))) - scores[tokens[t]])
    return losses


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 40), st.integers(2, 12), st.data())
def test_equals_the_definition(n: int, window: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, window))
    tokens = torch.randint(0, VOCABULARY, (n,), generator=torch.Generator().manual_seed(n))
    losses = token_losses(context_logits, tokens, window=window, stride=stride, batch=data.draw(st.integers(1, 4)))
    assert losses.tolist() == pytest.approx(judged(tokens.tolist(), window, stride), rel=1e-12)
    assert losses.numel() == (n - 1 if stride < window else n - math.ceil(n / window))


def test_uniform_guess_has_the_size_of_the_vocabulary() -> None:
    result = perplexity(lambda ids: torch.zeros(*ids.shape, 50), torch.arange(33) % 50, window=8)
    assert result.value == pytest.approx(50, rel=1e-6)
    assert (result.nll, result.scored) == (pytest.approx(math.log(50), rel=1e-6), 28)


def test_low_precision_logits_are_scored_in_float32() -> None:
    tokens = torch.randint(0, VOCABULARY, (30,))
    low = token_losses(lambda ids: context_logits(ids).bfloat16(), tokens, window=30)
    exact = token_losses(lambda ids: context_logits(ids).bfloat16().double(), tokens, window=30)
    assert low.dtype == torch.float32
    # A log-softmax of 7 logits of at most 1: a few roundings of numbers below 4.
    assert (low - exact).abs().max() < 8 * 4 * 2**-24


def test_a_model_may_give_logits_as_transformers_does() -> None:
    tokens = torch.arange(VOCABULARY).repeat(3)
    expected = perplexity(context_logits, tokens, window=4)
    assert perplexity(lambda ids: SimpleNamespace(logits=context_logits(ids)), tokens, window=4) == expected
    for wrong in (lambda ids: {}, lambda ids: context_logits(ids)[0]):
        with pytest.raises(ArgumentError, match=r"must give logits \[batch, length, vocabulary\], not (dict|shape)"):
            perplexity(wrong, tokens)


def test_hopeless_model_is_infinitely_surprised() -> None:
    def certain(ids: Tensor) -> Tensor:
        return torch.full((*ids.shape, 3), -math.inf).index_fill(-1, torch.tensor(0), 0.0)

    assert perplexity(certain, torch.tensor([0, 1, 0])).value == math.inf
    assert change_percent(900.0, 1.0) == change_percent(math.inf, 1.0) == math.inf


@pytest.mark.parametrize("wrong", [math.nan, math.inf], ids=str)
def test_logits_without_a_softmax_are_an_error_not_a_result(wrong: float) -> None:
    def logits(ids: Tensor) -> Tensor:
        return torch.zeros(*ids.shape, 3).index_fill(-1, torch.tensor(1), wrong)

    with pytest.raises(ArgumentError, match="NaN or infinity"):
        perplexity(logits, torch.tensor([0, 1, 2]))


BAD = {
    "one token": (1, 4, 4, 1),
    "window of one": (8, 1, 1, 1),
    "stride of none": (8, 4, 0, 1),
    "stride over window": (8, 4, 5, 1),
    "batch of none": (8, 4, 4, 0),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_refused(case: str) -> None:
    n, window, stride, batch = BAD[case]
    with pytest.raises(ArgumentError):
        perplexity(context_logits, torch.zeros(n, dtype=torch.int64), window=window, stride=stride, batch=batch)
