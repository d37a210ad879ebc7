"""How much transforms of a model around its weights gain on a real language model, on held-out text."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs the extra: pip install 'bitport[hf]'")

import bitport
from bitport.algorithms import AWQ, GPTQ, Clip, Rotate, SignRound, Smooth
from bitport.algorithms.solving import uses_data
from bitport.evaluate.perplexity import token_losses
from bitport.evaluate.yardstick import WINDOW, Yardstick
from bitport.integrations.huggingface import cast_parameters, logits_of

ROOT = Path(__file__).parents[2]
TEXT = 1024


@pytest.fixture(scope="module")
def yardstick() -> Yardstick:
    """Half of the text, of which most tests use a quarter, and a quarter of the data."""
    found = Yardstick(ROOT / "models" / "tinylm")
    found.tokens, found.calibration = found.tokens[: 4 * TEXT], found.calibration[:1024]
    return found


def losses(yardstick: Yardstick, model: Any, text: int = TEXT) -> Tensor:
    """Negative log-likelihood of each of the first tokens."""
    cast_parameters(model, torch.float32)
    return token_losses(logits_of(model), yardstick.tokens[:text], window=WINDOW, batch=4).double()


def added(yardstick: Yardstick, scheme: str, *algorithms: object, text: int = TEXT) -> list[Tensor]:
    """The increase that each algorithm causes in the negative log-likelihood of each token."""
    baseline = losses(yardstick, copy.deepcopy(yardstick.base), text)
    batches, found = [ids[None] for ids in yardstick.calibration.split(WINDOW // 2)], []
    for algorithm in algorithms:
        model = copy.deepcopy(yardstick.base)
        data = batches if uses_data(algorithm, scheme) else None  # type: ignore[arg-type]
        bitport.quantize_(model, scheme, algorithm=algorithm, calibrate=data, measure=False, progress=False)  # type: ignore[arg-type]
        found.append(losses(yardstick, model, text) - baseline)
    return found


def clearly_less(ours: Tensor, theirs: Tensor) -> bool:
    """By more than three standard errors of the mean of the per-token differences."""
    difference = theirs - ours
    return float(difference.mean()) > 3 * float(difference.std()) / difference.numel() ** 0.5


FEW = AWQ(steps=8)
"""Faster, and hardly worse."""


@pytest.mark.slow
def test_awq_and_gptq_at_three_bits(yardstick: Yardstick) -> None:
    """Both together are about as good as AWQ alone here: no text of this length tells which is better."""
    algorithms = ("rtn", "gptq", (FEW, Clip()), (FEW, GPTQ()))
    rtn, gptq, awq, both = added(yardstick, "int3", *algorithms, text=4 * TEXT)
    assert clearly_less(awq, 0.5 * rtn)
    assert clearly_less(both, gptq)
    assert not clearly_less(awq, both)


def test_awq_at_four_bits(yardstick: Yardstick) -> None:
    rtn, awq = added(yardstick, "int4", "rtn", (FEW, Clip()))
    assert awq.mean() < 0.5 * rtn.mean()


@pytest.mark.slow
def test_gptq_and_signround_at_two_bits(yardstick: Yardstick) -> None:
    """What channels have in common must count for little there: otherwise tokens that share little with the others
    suffer, with or without a search for channel scales."""
    trusting, learned = GPTQ(shrinkage=0.0), SignRound(steps=10, sweeps=0)
    learned_trusting = SignRound(steps=10, sweeps=0, start=trusting, shrinkage=0.0)
    before, after, sum_before, sum_after = added(
        yardstick, "int2", trusting, GPTQ(), (FEW, learned_trusting), (FEW, learned)
    )
    assert clearly_less(after, before)
    assert clearly_less(sum_after, sum_before)


def test_smoothquant_beside_four_bits(yardstick: Yardstick) -> None:
    """Four-bit weights and eight-bit inputs."""
    rtn, smooth = added(yardstick, "int4-int8", "rtn", (Smooth(steps=8),))
    assert smooth.mean() < 0.5 * rtn.mean()


def test_a_rotated_model_loses_nothing(yardstick: Yardstick) -> None:
    """In bf16, whose rounding of the weights is 2^-9: a hundredth of the loss at three bits."""
    model = copy.deepcopy(yardstick.base)
    before = losses(yardstick, copy.deepcopy(model)).mean()
    Rotate(untie=True).model_(model, [yardstick.calibration[None, : WINDOW // 2]])
    assert abs(losses(yardstick, model).mean() - before) < 1e-3
