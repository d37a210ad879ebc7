"""Batches: from a list, from a function that runs the model, from a text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bitport.calibrate.batches import batches_of, run_batch, text_batches
from bitport.errors import ArgumentError


class Sum(nn.Module):
    def forward(self, a: Tensor, b: Tensor | float = 0.0) -> Tensor:
        return a + b


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param((torch.ones(2), torch.ones(2)), id="tuple"),
        pytest.param([torch.ones(2), 1.0], id="list"),
        pytest.param({"a": torch.ones(2), "b": 1.0}, id="keywords"),
        pytest.param(torch.full((2,), 2.0), id="tensor"),
    ],
)
def test_a_batch_is_the_arguments(batch: object) -> None:
    assert run_batch(Sum(), batch).tolist() == [2.0, 2.0]


def test_the_calls_of_a_function_are_its_batches() -> None:
    model, reused = Sum(), torch.ones(2)

    def calibrate(model: nn.Module) -> None:
        model(reused, b=reused)
        reused.add_(1)
        model(reused)

    batches = batches_of(model, calibrate)
    assert [run_batch(model, batch).tolist() for batch in batches] == [[2.0, 2.0], [2.0, 2.0]]
    assert not model._forward_pre_hooks


def test_a_generator_can_be_run_twice() -> None:
    assert len(batches_of(Sum(), (torch.ones(1) for _ in range(3)))) == 3


def test_a_text_is_cut_into_windows(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("abcdefgh")
    assert [batch.tolist() for batch in text_batches(file, encode, window=3)] == [
        [[97, 98, 99]],
        [[100, 101, 102]],
        [[103, 104]],
    ]
    assert torch.cat(text_batches(file, encode, window=3, tokens=5), 1).tolist() == [[97, 98, 99, 100, 101]]


def test_lines_of_json_are_documents(tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text("\n".join(json.dumps({"text": text, "id": 1}) for text in ("ab", "cd")) + "\n\n")
    assert text_batches(file, encode)[0].tolist() == [[97, 98, 99, 100]]


PROBLEMS = {
    "one token": ("a.txt", "a", "gives 1 tokens"),
    "not JSON": ("a.jsonl", '{"text": "ab"}\nab', "line 2: not JSON"),
    "no text": ("a.jsonl", '{"story": "ab"}', 'line 1: each line must be an object with a string "text"'),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_problems_name_the_file(tmp_path: Path, problem: str) -> None:
    name, content, message = PROBLEMS[problem]
    (tmp_path / name).write_text(content)
    with pytest.raises(ArgumentError, match=message):
        text_batches(tmp_path / name, encode)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="cannot read"):
        text_batches(tmp_path / "nowhere.txt", encode)
