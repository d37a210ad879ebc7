"""End-to-end generation: what is compared, how, and that the models are complete."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench import generate
from bench.models import model_of, settings_of
from bench.speakers import Speakers

PROMPT = [5, 3, 8, 1]


def test_the_base_comes_first_and_llama_cpp_has_no_modes() -> None:
    chosen = [str(each) for each in generate.candidates("llama-1b", ["int4"], ["eager", "compiled"], peers=True)]
    bf16 = [f"torch bf16 {mode}" for mode in ("eager", "compiled", "frozen")]
    assert chosen[:5] == [*bf16, "bitport int4 eager", "bitport int4 compiled"]
    assert chosen[-2:] == ["llama.cpp Q4_0", "llama.cpp Q8_0"]
    assert not [each for each in generate.candidates("tinylm", ["int4"], ["eager"], True) if "llama" in str(each)]


def test_figures_are_ratios_inside_a_repetition() -> None:
    reading = {"base": dict(enumerate([1.0, 2.0, 4.0])), "mine": dict(enumerate([0.5, 1.0, 1.0]))}
    writing = {"base": dict(enumerate([0.1, 0.2, 0.1])), "mine": dict(enumerate([0.05, 0.1, 0.025]))}
    found = generate.figures(reading, writing, "mine", "base")
    assert (found["prompt_ms"], found["prompt_speedup"]) == (1000.0, 2.0)
    assert (found["tokens_per_second"], found["speedup"]) == (20.0, 2.0)
    assert found["noise"] == pytest.approx((3.0 - 2.0) / 2 / 2.0, abs=1e-3)


def test_a_slow_candidate_writes_less() -> None:
    assert generate.planned(read=0.1, step=0.01, tokens=16, repetitions=5) == (16, 5)
    assert generate.planned(read=1.0, step=1.0, tokens=16, repetitions=5) == (16, 2)
    steps, times = generate.planned(read=4.0, step=4.0, tokens=16, repetitions=5)
    assert (steps, times) == (2, generate.LEAST)


def test_wrong_logits_do_not_count() -> None:
    right = np.array([1.0, -2.0, 3.0])
    assert generate.decibels(right, right * 1.1) == pytest.approx(20.0, abs=0.05)
    assert not generate.wrong(generate.decibels(right, right * 1.1))
    assert not generate.wrong(None)
    for found in (-right, right * 1000, right * np.nan):
        assert generate.wrong(generate.decibels(right, found))


def test_layers_can_be_left_out() -> None:
    assert settings_of("llama-1b", 3) == {**settings_of("llama-1b"), "num_hidden_layers": 3}
    assert len(model_of("llama-tiny", 1).model.layers) == 1


def test_the_random_model_is_whole() -> None:
    """It is built on the meta device, where values computed at construction must not get lost."""
    from transformers import LlamaConfig, LlamaForCausalLM

    made = model_of("llama-tiny")
    usual = LlamaForCausalLM(LlamaConfig(**settings_of("llama-tiny"))).bfloat16().eval()
    usual.load_state_dict(made.state_dict())
    with torch.inference_mode():
        ids = torch.tensor([PROMPT])
        torch.testing.assert_close(made(input_ids=ids).logits, usual(input_ids=ids).logits, rtol=0.02, atol=0.01)


@pytest.mark.parametrize(("library", "scheme"), [("torch", "bf16"), ("bitport", "int8")], ids=["bf16", "int8"])
def test_a_speaker_reads_and_writes(library: str, scheme: str) -> None:
    """The tokens are those of a plain greedy loop without a cache, also on the second prompt."""
    speakers = Speakers(library, "llama-tiny", scheme, length=16)
    speakers.read("eager", [9, 9])
    speakers.write("eager", 2)
    assert speakers.read("eager", PROMPT) > 0
    written = [int(speakers._of._token)]
    for _ in range(3):
        assert speakers.write("eager", 1) > 0
        written.append(int(speakers._of._token))
    ids = list(PROMPT)
    with torch.inference_mode():
        for token in written:
            logits = speakers._of._model(input_ids=torch.tensor([ids])).logits[0, -1].float()
            assert logits[token] >= logits.max() - 0.02, "greedy, up to the rounding of bfloat16"
            ids.append(token)
