"""Batches: from a list, from a function that runs the model."""

from __future__ import annotations

import warnings
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitport.calibrate.batches import batches_of, run_batch, run_fresh
from bitport.errors import ArgumentError


class Sum(nn.Module):
    def forward(self, a: Tensor, b: Tensor | float = 0.0) -> Tensor:
        return a + b


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param((torch.ones(2), torch.ones(2)), id="tuple"),
        pytest.param([torch.ones(2), 1.0], id="list"),
        pytest.param({"a": torch.ones(2), "b": 1.0}, id="keywords"),
        pytest.param(UserDict({"a": torch.ones(2), "b": 1.0}), id="what a tokenizer gives"),
        pytest.param(torch.full((2,), 2.0), id="tensor"),
    ],
)
def test_a_batch_is_the_arguments(batch: object) -> None:
    assert run_batch(Sum(), batch).tolist() == [2.0, 2.0]
    assert [run_batch(Sum(), each).tolist() for each in batches_of(Sum(), [batch])] == [[2.0, 2.0]]


@pytest.mark.parametrize("given", [torch.ones(2, 3), {"a": torch.ones(2)}, "some text"], ids=["tensor", "dict", "text"])
def test_what_is_no_list_of_batches(given: Any) -> None:
    with pytest.raises(ArgumentError, match=f"a single {type(given).__name__}: give a list"):
        batches_of(Sum(), given)


@pytest.mark.parametrize("batch", ["some text", ["some text"], [1, 2, 3], {"input_ids": [[1, 2]]}], ids=repr)
def test_texts_and_lists_of_numbers_are_no_batches(batch: Any) -> None:
    """Which other libraries take, and a model refuses with an error of its own, or takes for several arguments."""
    with pytest.raises(ArgumentError, match=r"a tuple or dict of the model's arguments, not .*: make one of a text by"):
        batches_of(Sum(), [torch.ones(2), batch])
    assert batches_of(Sum(), [(torch.ones(2), 1.0)])


def test_padding_is_told() -> None:
    ids, mask = torch.ones(2, 3), torch.tensor([[1, 1, 1], [0, 1, 1]])
    with pytest.warns(UserWarning, match=r"padding \(attention_mask is 0 there\), which counts as any other input"):
        batches_of(Sum(), [{"a": ids, "attention_mask": mask}])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batches_of(Sum(), [{"a": ids, "attention_mask": torch.ones_like(mask)}, (ids, mask)])
        batches_of(Sum(), [{"a": ids, "attention_mask": torch.ones(2, 1, 3, 3).tril()}])  # what each token may see


def test_one_thing_twice_stays_one_thing() -> None:
    class Same(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> bool:
            return a is b

    x = torch.ones(2)
    assert run_fresh(Same(), (x, x))
    assert not run_fresh(Same(), (x, x.clone()))
    (call,) = batches_of(Same(), lambda model: model(x, b=x))
    assert run_fresh(Same(), call)


def test_what_a_module_writes_to_is_a_copy() -> None:
    """A cache, for example: the next run gets the batch as it was."""

    class Writes(nn.Module):
        def forward(self, a: Tensor, b: UserDict[str, int]) -> int:
            a.zero_()
            b["runs"] += 1
            return b["runs"]

    batch = (torch.ones(2), UserDict(runs=0))
    assert [run_fresh(Writes(), batch) for _ in range(2)] == [1, 1]
    assert batch[0].tolist() == [1.0, 1.0]


def test_arguments_with_a_history_are_copied_without_it() -> None:
    given = torch.ones(2, requires_grad=True) * 3
    (call,) = batches_of(Sum(), lambda model: model(given))
    assert (call.args[0].tolist(), call.args[0].requires_grad) == ([3.0, 3.0], False)


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
