"""Text by a packaged language model, here one that counts: after token t comes t + 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bitport.errors import ArgumentError, ExportError
from bitport.export import generate

WORDS, CAPACITY = 12, 8
META = {"kind": "causal-lm", "capacity": CAPACITY, "eos": [9, 10]}


class Counting:
    """Stands in for a program; its cache holds the tokens that were read, each at its position."""

    path = Path("counting.pt2")

    def __init__(self, **meta: Any) -> None:
        self.manifest = {"meta": META | meta}
        self.entry = {
            "inputs": [{}, {}, {"shape": [1, CAPACITY], "dtype": "I64"}],
            "outputs": [{"shape": [1, WORDS]}],
        }
        self.calls: list[tuple[str, list[int]]] = []
        self.decode, self.prefill = (Method(self, name) for name in ("decode", "prefill"))


class Method:
    def __init__(self, program: Counting, name: str) -> None:
        self.program, self.name, self.entry = program, name, program.entry

    def flat(self, ids: Tensor, positions: Tensor, cache: Tensor) -> tuple[Tensor]:
        assert ids.shape == (1, len(positions))
        cache[0, positions] = ids[0]
        self.program.calls.append((self.name, cache[0].tolist()))
        return (torch.nn.functional.one_hot(ids[:, -1] + 1, WORDS).bfloat16() * 4,)


def written(ids: list[int], count: int, program: Counting | None = None, **options: Any) -> list[int]:
    return [*generate(program or Counting(), ids, count, **options)]  # type: ignore[arg-type]


def test_tokens_are_read_at_their_positions() -> None:
    program = Counting()
    assert written([3, 1], 3, program) == [2, 3, 4]
    assert program.calls == [
        ("prefill", [3, 1, 0, 0, 0, 0, 0, 0]),
        ("decode", [3, 1, 2, 0, 0, 0, 0, 0]),
        ("decode", [3, 1, 2, 3, 0, 0, 0, 0]),
    ]


def test_a_prompt_of_one_token_takes_no_prefill() -> None:
    program = Counting()
    assert written([1], 1, program) == [2]
    assert program.calls == [("decode", [1, 0, 0, 0, 0, 0, 0, 0])]


@pytest.mark.parametrize(
    ("ids", "count", "wanted"),
    [([7], 5, [8, 9]), ([1], 99, [2, 3, 4, 5, 6, 7, 8, 9]), ([0] * CAPACITY, 5, [1]), ([5], 0, [])],
    ids=["end", "full and end", "full", "none"],
)
def test_where_it_ends(ids: list[int], count: int, wanted: list[int]) -> None:
    assert written(ids, count) == wanted


@pytest.mark.parametrize(("end", "wanted"), [(4, [2, 3, 4]), (None, [2, 3, 4, 5, 6, 7, 8, 9])])
def test_an_end_of_text_of_one_number_or_none(end: int | None, wanted: list[int]) -> None:
    assert written([1], 99, Counting(eos=end)) == wanted


def test_the_last_token_that_fits_is_given_when_the_cache_is_full() -> None:
    assert written([2, 0, 0], 99, Counting(eos=None)) == [1, 2, 3, 4, 5, 6]


def test_sampling_follows_the_probabilities() -> None:
    """With logits of 4 and 0 at temperature 2 the next number has e^2 / (e^2 + 11) = 0.40 of 1000 draws, within four
    standard errors of 0.0155."""
    draw, program = torch.Generator().manual_seed(0), Counting(eos=None)
    first = [next(generate(program, [3], 1, temperature=2.0, generator=draw)) for _ in range(1000)]  # type: ignore[arg-type]
    assert abs(first.count(4) / 1000 - 0.402) < 0.062
    again = torch.Generator().manual_seed(0)
    assert written([3], 1, program, temperature=2.0, generator=again) == first[:1]


@pytest.mark.parametrize(
    ("ids", "options", "says"),
    [
        ([], {}, "a prompt of 0 tokens: give 1 to 8"),
        ([1] * 9, {}, "a prompt of 9 tokens: give 1 to 8"),
        ([1, 12], {}, "the token 12; the model knows those from 0 to 11"),
        ([-1], {}, "the token -1"),
        ([1], {"temperature": -1.0}, "temperature=-1.0: give 0"),
        ([1], {"temperature": float("nan")}, "temperature=nan"),
    ],
)
def test_what_is_refused(ids: list[int], options: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        written(ids, 1, **options)


def test_other_programs_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"counting.pt2 is no language model: export one with `bitport export`"):
        written([1], 1, Counting(kind="speech"))
    with pytest.raises(ExportError, match="the capacity '8' and the number of words 12 must be numbers"):
        written([1], 1, Counting(capacity="8"))
