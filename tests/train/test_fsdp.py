"""Weights in training under FSDP2 (on_fsdp.py), in two and in three processes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitport.errors import ArgumentError
from bitport.train import prepare_
from tests import ranks

CHECKS = "tests.train.on_fsdp"


@pytest.mark.xdist_group("training by fsdp")  # started once, by one worker
@pytest.mark.parametrize("world", ranks.WORLDS)
@pytest.mark.parametrize("check", ranks.names(CHECKS))
def test_in_several_processes(check: str, world: int) -> None:
    ranks.must_pass(check, CHECKS, world)


def test_a_shard_is_not_rounded_alone() -> None:
    model = nn.Linear(64, 256)
    prepare_(model, "fp8-block")
    with torch.no_grad():
        shard = model.weight[:100]
    with pytest.raises(ArgumentError, match="is a shard, which is not rounded alone"):
        nn.functional.linear(torch.randn(2, 64), shard)
