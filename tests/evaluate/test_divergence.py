"""KL divergence and top-1 agreement against their definition, in Python floats and in float64."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitport.errors import ArgumentError
from bitport.evaluate import divergence
from bitport.evaluate.divergence import percentile, summarized, token_divergence

numbers = st.lists(st.floats(-30, 30), min_size=5, max_size=5)


def judged(p_logits: list[float], q_logits: list[float]) -> float:
    """The definition, with exact sums."""
    p_sum, q_sum = (math.fsum(map(math.exp, logits)) for logits in (p_logits, q_logits))
    terms = [
        math.exp(a) / p_sum * ((a - math.log(p_sum)) - (b - math.log(q_sum)))
        for a, b in zip(p_logits, q_logits, strict=True)
    ]
    return math.fsum(terms)


@settings(max_examples=200, deadline=None)
@given(numbers, numbers)
def test_equals_the_definition(p: list[float], q: list[float]) -> None:
    kl, agree = token_divergence(torch.tensor([p], dtype=torch.float64), torch.tensor([q], dtype=torch.float64))
    assert kl.item() == pytest.approx(judged(p, q), rel=1e-12, abs=1e-14)
    assert agree.item() == (p.index(max(p)) == q.index(max(q)))


@pytest.mark.parametrize("apart", [1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0])
def test_float32_is_enough(apart: float) -> None:
    """An error e of d = log q - log p, a few roundings of numbers up to 40, changes a term p d^2 / 2 by d e. Relative
    to the sum that is 2 e / d, and less in practice, since the errors of many tokens differ in sign."""
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(8, 4096, generator=generator) * 4
    q = p + apart * torch.randn(8, 4096, generator=generator)
    exact, _ = token_divergence(p.double(), q.double())
    kl, _ = token_divergence(p, q)
    assert ((kl - exact).abs() / exact).max() < 2 * (4 * 40 * 2**-24) / apart + 64 * 2**-24


def test_low_precision_logits_are_compared_in_float32() -> None:
    p, q = torch.randn(2, 6, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    kl, agree = token_divergence(p, q)
    exact, same = token_divergence(p.double(), q.double())
    assert torch.allclose(kl, exact, rtol=1e-5, atol=0)
    assert torch.equal(agree, same)


def test_the_same_is_nothing_apart() -> None:
    p = torch.randn(4, 30) * 10
    kl, agree = token_divergence(p, p.clone())
    assert (kl.tolist(), agree.all().item()) == ([0.0] * 4, True)


def test_a_constant_added_to_logits_changes_next_to_nothing() -> None:
    """Softmax is invariant to it; what float32 adds is a rounding of 1e3, squared."""
    p = torch.randn(4, 1000) * 3
    kl, _ = token_divergence(p, p + 1000)
    assert kl.max() < (1000 * 2**-24) ** 2


def test_ruled_out_tokens() -> None:
    """Tokens ruled out by the original count for nothing; those ruled out only by the other have infinite
    divergence."""
    some = torch.tensor([[0.0, 1.0, -math.inf]])
    less = torch.tensor([[0.0, -math.inf, -math.inf]])
    every = torch.tensor([[0.0, 1.0, 2.0]])
    assert token_divergence(some, some)[0].item() == 0
    assert token_divergence(some, every)[0].item() == pytest.approx(
        -math.log1p(-math.exp(2) / (1 + math.e + math.exp(2)))
    )
    assert token_divergence(some, less)[0].item() == math.inf


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = torch.randn(2, 7, 20)
    whole = token_divergence(p, q)
    for chunk in (1, 40, 10**9):
        monkeypatch.setattr(importlib.import_module("bitport.evaluate.divergence"), "CHUNK", chunk)
        assert all(torch.equal(a, b) for a, b in zip(whole, token_divergence(p, q), strict=True))


def test_other_vocabularies_are_refused() -> None:
    with pytest.raises(ArgumentError, match="one vocabulary"):
        token_divergence(torch.zeros(3, 5), torch.zeros(3, 6))


@pytest.mark.parametrize(("n", "part", "index"), [(1, 0.99, 0), (100, 0.99, 98), (101, 0.99, 99), (10, 0.5, 4)])
def test_percentile_is_one_of_the_values(n: int, part: float, index: int) -> None:
    values = torch.arange(n, dtype=torch.float64)[torch.randperm(n)]
    assert percentile(values, part) == index
    assert (values <= index).sum() >= part * n > (values < index).sum()


def test_summary() -> None:
    parts = [
        (torch.tensor([0.0, 4.0]).double(), torch.tensor([True, False])),
        (torch.ones(2).double(), torch.ones(2) > 0),
    ]
    found = summarized(parts)
    assert (found.kl, found.kl_p99, found.kl_max, found.top1, found.tokens) == (1.5, 4.0, 4.0, 0.75, 4)


def test_two_models_in_memory() -> None:
    """Over the tokens that perplexity scores: all but the first of each window."""

    def uniform(ids: Tensor) -> Tensor:
        return torch.zeros(*ids.shape, 4)

    def certain(ids: Tensor) -> Tensor:
        return torch.zeros(*ids.shape, 4).index_fill(-1, torch.tensor(2), 100.0)

    tokens = torch.arange(20) % 4
    found = divergence(certain, uniform, tokens, window=5, batch=3)
    assert (found.tokens, found.top1) == (16, 0)
    assert found.kl == pytest.approx(math.log(4), rel=1e-6)
    assert divergence(certain, certain, tokens, window=5).kl == 0
