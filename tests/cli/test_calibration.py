"""Calibration data are as many tokens as asked for, of the text that was given, in windows that the model supports."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from bitport.cli import calibration
from bitport.errors import ArgumentError
from bitport.integrations.huggingface import load_model

WINDOW = 40


@pytest.fixture
def model(llama: Path) -> PreTrainedModel:
    loaded = load_model(llama)
    loaded.config.max_position_embeddings = WINDOW
    return loaded


def options(llama: Path, text: Path, seed: int | None = None) -> argparse.Namespace:
    return argparse.Namespace(source=llama, data=text, data_tokens=100, data_seed=seed)


def test_a_text_is_cut_into_windows(llama: Path, text: Path, model: PreTrainedModel) -> None:
    args = options(llama, text)
    batches = calibration.batches(args, model)
    ids = AutoTokenizer.from_pretrained(llama)(text.read_text()).input_ids
    assert [batch.shape for batch in batches] == [(1, WINDOW), (1, WINDOW), (1, 20)]
    assert torch.cat(batches, 1).tolist() == [ids[:100]]
    assert [batch.shape for batch in calibration.placeholders(args, model)] == [batch.shape for batch in batches]


def test_a_seed_draws_from_more_of_it(llama: Path, text: Path, model: PreTrainedModel) -> None:
    args = options(llama, text, seed=3)
    ids = AutoTokenizer.from_pretrained(llama)(text.read_text()).input_ids
    windows = [ids[at : at + WINDOW] for at in range(0, 400, WINDOW)]
    drawn = [batch[0].tolist() for batch in calibration.batches(args, model)]
    places = [windows.index(batch) for batch in drawn[:2]]
    assert len({*places}) == 2
    assert places != [0, 1]
    assert calibration.described(args) == f"at most 100 tokens of {text}, seed 3"


def test_a_text_of_another_tokenizer_is_refused(llama: Path, text: Path, model: PreTrainedModel) -> None:
    model.set_input_embeddings(torch.nn.Embedding(10, 8))
    with pytest.raises(ArgumentError, match="but the model has only 10: do tokenizer and data belong to it"):
        calibration.batches(options(llama, text), model)


def test_a_model_that_does_not_fit_is_not_asked_for_text(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smaller of what the machine and the user allow counts."""
    args = argparse.Namespace(source=llama, device=torch.device("cpu"))
    for here, args.memory_limit in ((1000, None), (1000, 10**12), (None, 1000)):
        monkeypatch.setattr(calibration, "available", lambda here=here: here)
        with pytest.raises(ArgumentError, match=r"in memory: .* and 1\.0 kB are allowed\. Give a text with --data"):
            calibration.check_loadable(args)
    for here, args.memory_limit in ((None, None), (10**12, 10**12)):
        monkeypatch.setattr(calibration, "available", lambda here=here: here)
        calibration.check_loadable(args)
