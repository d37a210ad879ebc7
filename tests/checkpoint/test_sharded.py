"""Checkpoints, ours and torch's, of models sharded over several processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from bitport.checkpoint import ModelState
from bitport.errors import CheckpointError
from bitport.tensor import quantize_tensor
from tests import ranks

from .sharded_models import full, quantized, same

pytestmark = pytest.mark.xdist_group("sharded")  # started once, by one worker
IN_TWO, IN_THREE = "tests.checkpoint.on_sharded", "tests.checkpoint.on_dcp"


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where the checks of two processes have left checkpoints."""
    folder = tmp_path_factory.mktemp("sharded")
    ranks.run(IN_TWO, 2, folder)
    return folder


@pytest.mark.parametrize("check", ranks.names(IN_TWO))
def test_in_two_processes(left: Path, check: str) -> None:
    ranks.must_pass(check, IN_TWO, 2, left)


@pytest.mark.parametrize("check", ranks.names(IN_THREE))
def test_in_three_processes_what_two_have_saved(left: Path, check: str) -> None:
    ranks.must_pass(check, IN_THREE, 3, left)


@pytest.mark.parametrize("name", ["dcp-in_tensor_parallel", "dcp-by_fsdp"])
def test_in_one_process_what_two_have_saved(left: Path, name: str) -> None:
    model = quantized(3)
    dcp.load({"model": ModelState(model)}, checkpoint_id=left / name, no_dist=True)
    assert same(full(model), quantized().state_dict())


def test_a_state_that_is_not_the_models() -> None:
    model = quantized()
    state = ModelState(model).state_dict()
    parts = [key for key in state if key.startswith("up.weight.")]
    assert parts == [f"up.weight.int4-g32.{part}" for part in ("qdata.uint8", "scale.float32", "zero.uint8")]
    del state[parts[0]]
    with pytest.raises(CheckpointError, match=r"Missing: up\.weight\.int4-g32\.qdata\.uint8; unknown: more$"):
        ModelState(model).load_state_dict({**state, "more": torch.zeros(1)})


def test_an_order_of_columns_that_is_none() -> None:
    """It is the only part used as indices, so it is validated."""
    layer = nn.Linear(96, 8)
    q = quantize_tensor(layer.weight.detach(), "int4-g32", perm=torch.randperm(96))
    layer.weight = nn.Parameter(q, requires_grad=False)
    state = ModelState(layer).state_dict()
    ModelState(layer).load_state_dict(state)
    with pytest.raises(CheckpointError, match="weight was read, and is damaged: perm must hold each"):
        ModelState(layer).load_state_dict({**state, "weight.int4-g32.perm.int64": torch.full((96,), 96)})
