"""Checks in several processes: learning scales under FSDP2 and DistributedDataParallel, against one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import bitport as bp
from bitport.errors import ArgumentError
from bitport.train import convert_, learn_scales_
from tests.train.steps import steps

SCHEMES = ("int4-g32", "int8-dyn", "nf4")


def model_of(scheme: str) -> nn.Sequential:
    """A model whose rows no number of processes divides evenly."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 131), nn.ReLU(), nn.Linear(131, 40, bias=False))
    bp.quantize_(model, scheme)
    learn_scales_(model)
    return model


def close(state: dict[str, Any], wanted: dict[str, Any]) -> bool:
    changes = [name for name in wanted if name.endswith("original0")]
    return len(changes) == 2 and all(torch.allclose(state[name], wanted[name], atol=1e-4) for name in changes)


def check_fsdp(mesh: Any) -> None:
    for scheme in SCHEMES:
        alone = model_of(scheme)
        together = copy.deepcopy(alone)
        for layer in (together[0], together[2], together):
            fully_shard(layer, mesh=mesh)
        assert steps(together, size=12) == pytest.approx(steps(alone, size=12), rel=1e-5), scheme
        with pytest.raises(ArgumentError, match="load its full state_dict into a prepared model of one process"):
            convert_(together)
        state = get_model_state_dict(together, options=StateDictOptions(full_state_dict=True))
        assert close(state, alone.state_dict()), scheme  # type: ignore[arg-type]


def check_data_parallel(mesh: Any) -> None:
    """Gradients are averaged over processes, each with rows of its own, which gives those of all rows."""
    rank, world = mesh.get_local_rank(), mesh.size()
    for scheme in SCHEMES:
        alone = model_of(scheme)
        together = DistributedDataParallel(copy.deepcopy(alone), init_sync=False)
        steps(together, size=12, rows=slice(rank * 12 // world, (rank + 1) * 12 // world))
        steps(alone, size=12)
        assert close(together.module.state_dict(), alone.state_dict()), scheme
        x = torch.randn(4, 64)
        with torch.no_grad():
            want = together(x)
        convert_(together.module)
        with torch.no_grad():
            assert torch.equal(together.module(x), want), scheme
