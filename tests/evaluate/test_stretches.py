"""Means along a text and their standard errors, against float64 formulas and against resampling."""

from __future__ import annotations

import copy
import math
import statistics
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra: pip install 'bitport[hf]'")

from bitport.errors import ArgumentError
from bitport.evaluate.compare import quantized
from bitport.evaluate.divergence import divergence
from bitport.evaluate.stretches import STRETCH, by_stretches, estimate
from bitport.evaluate.yardstick import WINDOW, Yardstick
from bitport.integrations.huggingface import cast_parameters, logits_of


def test_windows_are_whole_stretches() -> None:
    assert (WINDOW - 1) % STRETCH == 0


def test_means_of_stretches_have_the_mean_of_the_tokens() -> None:
    values = torch.rand(7 * STRETCH, generator=torch.Generator().manual_seed(0))
    found = by_stretches(values)
    assert len(found) == 7
    assert statistics.mean(found) == pytest.approx(values.double().mean().item(), rel=1e-5)
    assert found[2] == pytest.approx(values[2 * STRETCH : 3 * STRETCH].double().mean().item(), rel=1e-5)


def test_a_part_of_a_stretch_is_refused() -> None:
    with pytest.raises(ArgumentError, match=f"{STRETCH + 1} scored tokens are no multiple of {STRETCH}"):
        by_stretches(torch.zeros(STRETCH + 1))


def test_the_error_is_that_of_means_over_many_texts() -> None:
    """It is estimated from 40 stretches with a relative deviation of 1 / sqrt(2 * 39), and averaged over 400 texts
    here, so it is off by 0.6 %, and the deviation of the 400 means by 3.5 %: four times both together are 14 %."""
    texts = torch.randn(400, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64).tolist()
    found = [estimate(text) for text in texts]
    error = math.sqrt(statistics.mean(each.error**2 for each in found))
    assert statistics.stdev(each.mean for each in found) == pytest.approx(error, rel=0.14)
    assert error == pytest.approx(1 / math.sqrt(40), rel=0.03)


def test_what_two_models_share_cancels() -> None:
    hard = torch.randn(30, generator=torch.Generator().manual_seed(2)).tolist()
    one, other = [each + 0.25 + 0.01 * (at % 2) for at, each in enumerate(hard)], hard
    paired = estimate(one, other)
    assert paired.mean == pytest.approx(0.255)
    assert paired.error == pytest.approx(0.005 * math.sqrt(30 / 29) / math.sqrt(30))
    assert paired.error < estimate(one).error / 50


def test_a_model_along_its_text() -> None:
    """As the means over all tokens, up to the six digits that are kept."""
    yardstick = Yardstick(Path(__file__).parents[2] / "models" / "tinylm")
    yardstick.tokens = yardstick.tokens[: 2 * WINDOW]
    model = quantized(yardstick.base, "int3", [])
    found = yardstick.stretches(model)
    base = copy.deepcopy(yardstick.base)
    cast_parameters(base, torch.float32)
    apart = divergence(logits_of(base), logits_of(model), yardstick.tokens, window=WINDOW, batch=4)
    assert len(found.kl) == apart.tokens / STRETCH == 14
    assert estimate(found.kl).mean == pytest.approx(apart.kl, rel=1e-5)
    assert estimate(found.top1).mean == pytest.approx(apart.top1, rel=1e-5)
    assert estimate(found.nll).mean == pytest.approx(yardstick.nll(model), rel=1e-5)
