"""Size, speed, noise and comparison of models, on a small random one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bitport as bp
from bitport.errors import ArgumentError
from bitport.evaluate import perplexity
from bitport.evaluate.compare import BASELINE, compare, quantized
from bitport.evaluate.golden import as_markdown
from bitport.evaluate.measure import generation_speed, kernels_of, size_of
from bitport.evaluate.noise import noise
from bitport.evaluate.perplexity import token_losses
from bitport.integrations.huggingface import cast_parameters, load_model, logits_of

from ..integrations.models import make_directory

TOKENS = torch.randint(0, 320, (65,), generator=torch.Generator().manual_seed(1))
WINDOW = 32


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_model(make_directory(tmp_path_factory.mktemp("hf") / "llama"))


def test_size_counts_tied_weights_once_and_scales_too(base: Any) -> None:
    matrices = 2 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 256 * 128)
    floats = 320 * 128 + 5 * 128
    before = size_of(base)
    assert (before.weights, before.nbytes, before.bits_per_weight) == (matrices + floats, 2 * (matrices + floats), 16)
    after = size_of(quantized(base, "int4-g32", []))
    # Per group of 32: 16 bytes of codes, a bf16 scale, a zero point of one byte.
    assert (after.weights, after.nbytes) == (before.weights, matrices // 32 * 19 + 2 * floats)


def test_compare_measures_each_scheme_alone(base: Any) -> None:
    rows = [row for _, row in compare(base, ["int8-static", "int2"], TOKENS, WINDOW, [TOKENS[None, :WINDOW]])]
    assert [row.scheme for row in rows] == [BASELINE, "int8-static", "int2"]
    assert not any(isinstance(param, bp.QTensor) for param in base.parameters())
    judge = perplexity(logits_of(base), TOKENS, window=WINDOW).value
    # Batched and single windows differ by the order of sums in bf16.
    assert rows[0].perplexity == pytest.approx(judge, rel=2**-8)
    assert (rows[0].change_percent, rows[0].kernel) == (0, "torch")
    assert rows[2].change_percent == pytest.approx(100 * (rows[2].perplexity / rows[0].perplexity - 1), abs=1e-9)
    assert abs(rows[1].change_percent) < abs(rows[2].change_percent)


def test_kernels_of_names_what_explain_says(base: Any) -> None:
    model = quantized(base, "int8", [])
    explained = {layer.decisions[1].kernel for layer in bp.explain(model, (1,)).layers}
    assert set(kernels_of(model)) == explained
    assert kernels_of(base) == ()


@pytest.mark.parametrize(
    ("scheme", "bound"), [("int4", 2**-15), ("int8-dyn", 2**-4)], ids=["exact input", "rounded input"]
)
def test_noise_is_small_and_leaves_no_trace(base: Any, scheme: str, bound: float) -> None:
    """Exact inputs: the budget is about 2^-20 of each output, and a few layers add up. Rounded inputs: at worst an
    occasional step of the 8-bit grid."""
    model = quantized(base, scheme, [])
    cast_parameters(model, torch.float32)
    losses = token_losses(logits_of(model), TOKENS, window=WINDOW)
    assert 0 < noise(model, TOKENS, WINDOW, losses) < bound
    assert torch.equal(token_losses(logits_of(model), TOKENS, window=WINDOW), losses)


class Counting:
    """Generates nothing, and records what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def generate(self, prompt: Tensor, *, max_new_tokens: int, min_new_tokens: int, **_: Any) -> Tensor:
        self.asked.append((min_new_tokens, max_new_tokens))
        return prompt


def test_generation_speed_generates_exactly_the_tokens() -> None:
    model = Counting()
    assert generation_speed(model, torch.zeros(1, 3, dtype=torch.int64), 9) > 0
    assert model.asked == [(2, 2), (9, 9)]
    with pytest.raises(ArgumentError, match="new_tokens=0"):
        generation_speed(model, torch.zeros(1, 3, dtype=torch.int64), 0)


def test_markdown_has_a_line_per_row(tmp_path: Path) -> None:
    row = {"scheme": "int4", "bits_per_weight": 4.25, "perplexity": 3.14159, "change_percent": -0.126, "noise": 1e-6}
    text = as_markdown({"model": "models/some", "tokens": 10, "window": 5, "rows": [row]})
    assert "| int4 | 4.25 | 3.1416 | -0.13 % |" in text.splitlines()
    assert "`models/some`" in text
