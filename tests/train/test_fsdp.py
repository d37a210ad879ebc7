"""Weights in training under FSDP2 (on_fsdp.py), in two and in three processes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitport.errors import ArgumentError
from bitport.train import prepare_
from tests import ranks


@pytest.mark.parametrize("world", ranks.WORLDS)
def test_fsdp(world: int) -> None:
    assert ranks.run("tests.train.on_fsdp", world) == dict.fromkeys(ranks.names("tests.train.on_fsdp"), "")


def test_a_shard_is_not_rounded_alone() -> None:
    model = nn.Linear(64, 256)
    prepare_(model, "fp8-block")
    with torch.no_grad():
        shard = model.weight[:100]
    with pytest.raises(ArgumentError, match="is a shard, which is not rounded alone"):
        nn.functional.linear(torch.randn(2, 64), shard)
