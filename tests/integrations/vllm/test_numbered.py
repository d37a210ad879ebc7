"""Applying a weight loader to row numbers reveals what it would do to the weights.

Loaders in the style of vLLM run once on float matrices, which gives the expected result, and once through Numbered.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bitport.errors import CheckpointError
from bitport.integrations.vllm.numbered import Numbered
from bitport.schemes import preset
from bitport.tensor import QTensor, quantize_tensor

K = 64
HEADS = {"q": (0, 64), "k": (64, 32), "v": (96, 32)}
"""For one process of two: where they begin, and their number of rows."""


def heads(param: Tensor, loaded_weight: Tensor, shard: str, rank: int = 1) -> None:
    start, size = HEADS[shard]
    param.data.narrow(0, start, size).copy_(loaded_weight.narrow(0, rank * size, size))


def all_heads(param: Tensor, loaded_weight: Tensor, rank: int = 1) -> None:
    """Load all heads from one fused matrix."""
    at = 0
    for shard, (_, size) in HEADS.items():
        heads(param, loaded_weight.narrow(0, at, 2 * size), shard, rank)
        at += 2 * size


def columns(param: Tensor, loaded_weight: Tensor, rank: int = 1) -> None:
    size = param.shape[1]
    param.data.copy_(loaded_weight.narrow(1, rank * size, size))


def vocabulary(param: Tensor, loaded_weight: Tensor, start: int = 32) -> None:
    """Load the remaining part of the vocabulary, and pad the rest of the parameter."""
    part = loaded_weight.narrow(0, start, min(len(loaded_weight) - start, len(param)))
    param[: len(part)].data.copy_(part)
    param[len(part) :].data.fill_(0)


def experts(param: Tensor, loaded_weight: Tensor, expert: int, half: int) -> None:
    size = param.shape[1] // 2
    param.data[expert].narrow(0, half * size, size).copy_(loaded_weight)


def weight(rows: int, columns: int = K) -> QTensor:
    return quantize_tensor(torch.randn(rows, columns), preset("int4-g32"))


@pytest.mark.parametrize(
    ("load", "dim", "shape", "given"),
    [
        (heads, 0, (128, K), [((128, K), ("q",)), ((64, K), ("k",)), ((64, K), ("v",))]),
        (heads, 0, (128, K), [((64, K), ("v",)), ((128, K), ("q",)), ((64, K), ("k",))]),
        (all_heads, 0, (128, K), [((256, K), ())]),
        (columns, 1, (16, 32), [((16, K), ())]),
        (vocabulary, 0, (64, K), [((70, K), ())]),
        (lambda *args: vocabulary(*args, start=0), 0, (64, K), [((70, K), ())]),
        (lambda *args: vocabulary(*args, start=70), 0, (64, K), [((70, K), ())]),
    ],
)
def test_a_loader_of_floats_places_quantized_rows(
    load: Callable[..., None], dim: int, shape: tuple[int, int], given: list[tuple[tuple[int, int], tuple[object, ...]]]
) -> None:
    right = torch.full(shape, torch.nan)
    length = [1, 1]
    length[dim] = shape[dim]
    numbered = Numbered(tuple(length), dim, load)
    for size, which in given:
        source = weight(*size)
        load(right, source.dequantize(), *which)
        numbered.param.weight_loader(numbered.param, source, *which)
    pieces = list(numbered.pieces(numbered.param))
    assert all(isinstance(piece, QTensor) for piece in pieces)
    assert torch.equal(torch.cat([piece.dequantize() for piece in pieces], dim), right)


def test_experts_take_theirs() -> None:
    right = torch.full((3, 64, K), torch.nan)
    numbered = Numbered((3, 64, 1), 0, experts)
    for expert, half in ((2, 1), (0, 0), (1, 0), (1, 1), (0, 1), (2, 0)):
        source = weight(32)
        experts(right, source.dequantize(), expert, half)
        numbered.param.weight_loader(param=numbered.param, loaded_weight=source, expert=expert, half=half)
    for part, there in zip(numbered.param.unbind(), right, strict=True):
        assert torch.equal(torch.cat([piece.dequantize() for piece in numbered.pieces(part)]), there)


def test_floats_are_placed_alike() -> None:
    numbered, source = Numbered((64, 1), 0, vocabulary), torch.randn(70, K)
    numbered.param.weight_loader(numbered.param, source)
    (piece,) = numbered.pieces(numbered.param)
    assert torch.equal(piece, torch.cat([source[32:], torch.zeros(26, K)]))


def test_rows_that_two_matrices_fill_are_of_the_second() -> None:
    numbered = Numbered((128, 1), 0, heads)
    for shard in ("q", "k", "v", "k"):
        numbered.param.weight_loader(numbered.param, weight(128 if shard == "q" else 64), shard)
    pieces = list(numbered.pieces(numbered.param))
    assert torch.equal(pieces[1].dequantize(), numbered.sources[3].dequantize()[32:])


def test_what_nothing_fills_is_named() -> None:
    numbered = Numbered((128, 1), 0, heads)
    numbered.param.weight_loader(numbered.param, weight(128), "q")
    with pytest.raises(CheckpointError, match="does not have 64 of the 128 rows of qkv"):
        numbered.check(numbered.param, "qkv")
