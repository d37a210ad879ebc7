"""F.embedding_bag over quantized tables and tables in training, against float64 sums of rows and torch's own op."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import bitport
from bitport.errors import ArgumentError
from bitport.train import convert_, prepare_

IDS, STARTS = torch.tensor([3, 7, 3, 1, 49, 0, 3, 12, 3, 3]), torch.tensor([0, 4, 4, 8])
"""Bags of four, zero, four and two ids."""


def table(scheme: str = "int4-g32", **options: Any) -> nn.EmbeddingBag:
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(50, 96, **options)
    report = bitport.quantize_(bag, {"*": scheme})
    assert [layer.scheme for layer in report.layers] == [scheme]
    return bag


JOINED: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda rows: rows.sum(0),
    "mean": lambda rows: rows.mean(0),
    "max": lambda rows: rows.amax(0),
}


def by_hand(bag: nn.EmbeddingBag, weights: Tensor | None = None) -> Tensor:
    """The result bag by bag, in float64; a bag that is empty or holds only padding gives 0."""
    rows, ends = bag.weight.dequantize().double(), [*STARTS[1:].tolist(), len(IDS)]  # type: ignore[operator]
    made = []
    for start, end in zip(STARTS.tolist(), ends, strict=True):
        kept = [at for at in range(start, end) if IDS[at] != bag.padding_idx]
        each = rows[IDS[kept]] * (1 if weights is None else weights[kept, None].double())
        made.append(JOINED[bag.mode](each) if kept else torch.zeros(96, dtype=torch.float64))
    return torch.stack(made)


@pytest.mark.parametrize("padding", [None, 3, 0, -1])
@pytest.mark.parametrize("mode", JOINED)
@pytest.mark.parametrize("scheme", ["int8", "int4-g32", "nf4", "fp8-wo", "mxfp4-wo"])
def test_bags_are_those_of_the_rows(scheme: str, mode: str, padding: int | None) -> None:
    bag = table(scheme, mode=mode, padding_idx=padding)
    torch.testing.assert_close(bag(IDS, STARTS).double(), by_hand(bag), rtol=1e-6, atol=1e-6)
    floats = bitport.dequantize_(copy.deepcopy(bag))
    assert torch.equal(bag(IDS, STARTS), floats(IDS, STARTS))
    assert torch.equal(bag(IDS.view(2, 5)), floats(IDS.view(2, 5)))
    assert torch.equal(bag(IDS.int(), STARTS.int()), floats(IDS, STARTS))
    nothing = torch.tensor([0, 0])
    assert torch.equal(bag(IDS[:0], nothing), floats(IDS[:0], nothing))


@pytest.mark.parametrize("padding", [None, 3])
def test_weights_of_samples(padding: int | None) -> None:
    bag, weights = table(mode="sum", padding_idx=padding), torch.rand(len(IDS), requires_grad=True)
    y = bag(IDS, STARTS, per_sample_weights=weights)
    torch.testing.assert_close(y.double(), by_hand(bag, weights), rtol=1e-6, atol=1e-6)
    y.sum().backward()
    rows = bag.weight.dequantize()[IDS].sum(-1)  # type: ignore[operator]
    torch.testing.assert_close(weights.grad, rows * (padding != IDS), rtol=1e-5, atol=1e-5)


def test_the_last_offset_may_be_given() -> None:
    bag = table(include_last_offset=True)
    wanted = table()(IDS, STARTS)
    assert torch.equal(bag(IDS, torch.cat([STARTS, torch.tensor([len(IDS)])])), wanted)


def test_compiled_and_exported() -> None:
    bag, more = table(mode="sum"), torch.arange(21).view(7, 3)
    torch.compiler.reset()
    compiled = torch.compile(bag, backend="aot_eager", fullgraph=True, dynamic=True)
    program = torch.export.export(bag, (IDS.view(5, 2),), dynamic_shapes=({0: torch.export.Dim("bags"), 1: None},))
    for ids in (IDS.view(5, 2), more[:, :2]):
        assert torch.equal(compiled(ids), bag(ids))
        assert torch.equal(program.module()(ids), bag(ids))
    assert torch.equal(compiled(more), bag(more))


def test_padding_in_bags_of_any_length() -> None:
    """One program serves all lengths: torch's own handling of padding_idx would specialize on the length."""
    bag = table(padding_idx=3)
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(bag, backend=counter, fullgraph=True, dynamic=True)
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(bag, (IDS.view(2, 5),), dynamic_shapes=({1: length},)).module()
    for size in range(3, 12):
        ids = torch.randint(0, 50, (2, size))
        assert torch.equal(compiled(ids), bag(ids))
        assert torch.equal(program(ids), bag(ids))
    assert counter.frame_count == 1


def test_what_a_table_cannot_do_is_refused() -> None:
    bag = table()
    bags = functools.partial(F.embedding_bag, IDS, bag.weight, STARTS)
    with pytest.raises(IndexError, match="rows 0 to 49"):
        bag(IDS + 1, STARTS)
    for look_up in (lambda at: F.embedding(IDS, bag.weight, at), lambda at: bags(padding_idx=at)):
        for outside in (50, -51):
            with pytest.raises(ArgumentError, match=f"padding_idx is a row of the table, -50 to 49, not {outside}"):
                look_up(outside)
    with pytest.raises(ArgumentError, match="max_norm rewrites the table"):
        F.embedding_bag(IDS, bag.weight, STARTS, max_norm=1.0)
    for wrong in (lambda: bag(IDS), lambda: bag(IDS.view(5, 2), STARTS), lambda: bag(IDS, STARTS[None])):
        with pytest.raises(ArgumentError, match=r"\[ids\] with offsets \[bags\], not \[(10|5, 2)\] with "):
            wrong()
    with pytest.raises(ArgumentError, match="is sum, mean, max, not 'median'"):
        F.embedding_bag(IDS, bag.weight, STARTS, mode="median")
    for mode, weights in (("mean", torch.rand(10)), ("sum", torch.rand(9))):
        with pytest.raises(ArgumentError, match=r"per_sample_weights are for the mode sum.* \[10\]"):
            F.embedding_bag(IDS, bag.weight, STARTS, mode=mode, per_sample_weights=weights)


@pytest.mark.parametrize("mode", JOINED)
def test_tables_in_training(mode: str) -> None:
    """Value and gradient equal those of the converted table."""
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(50, 96, mode=mode, padding_idx=3)
    prepare_(bag, {"*": "int4-g32"})
    y = bag(IDS, STARTS)
    y.square().sum().backward()
    gradient = bag.weight.grad
    convert_(bag)
    assert torch.equal(bag(IDS, STARTS), y)
    floats = bitport.dequantize_(bag).requires_grad_(True)
    floats(IDS, STARTS).square().sum().backward()
    torch.testing.assert_close(torch.as_tensor(gradient), floats.weight.grad, rtol=1e-5, atol=1e-6)
