"""Optimizers of parameters sharded over two processes: run by tests/ranks.py."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from bitport.errors import ArgumentError
from bitport.tensor import QTensor
from bitport.train import prepare_
from bitport.train.optim import SGD, AdamW

STATES = ("8bit", "fp8")


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 101), nn.Tanh(), nn.Linear(101, 40, bias=False))


def train(model: nn.Module, optimizer: AdamW, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        x = torch.randn(8, 300)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def sharded(mesh: DeviceMesh, states: str, lr: float = 1e-2) -> tuple[nn.Module, AdamW]:
    model = build()
    fully_shard(model, mesh=mesh)
    return model, AdamW(model.parameters(), lr=lr, states=states, min_elements=5000)


def check_the_numbers_are_those_of_one_process(mesh: DeviceMesh) -> None:
    """Blocks lie within rows, so the codes of shards are the same."""
    for states in STATES:
        alone, (model, many) = build(), sharded(mesh, states)
        one = AdamW(alone.parameters(), lr=1e-2, states=states, min_elements=5000)
        train(alone, one, range(4))
        train(model, many, range(4))
        for mine, piece in zip(alone.parameters(), model.parameters(), strict=True):
            assert isinstance(piece, DTensor)
            for name, value in many.state[piece].items():
                if name != "step":
                    assert isinstance(value, DTensor)
                    assert isinstance(value.to_local(), QTensor) == (piece.shape[-1] == 300), (name, piece.shape)
            assert torch.equal(whole(piece), mine.detach())


def check_training_goes_on_from_a_checkpoint(mesh: DeviceMesh) -> None:
    for states in STATES:
        (model, many), (resumed, other) = sharded(mesh, states), sharded(mesh, states, lr=0.5)
        train(model, many, range(4))
        dcp.save({"optimizer": get_optimizer_state_dict(model, many)}, checkpoint_id=states)
        target = get_optimizer_state_dict(resumed, other)
        dcp.load({"optimizer": target}, checkpoint_id=states)
        set_optimizer_state_dict(resumed, other, target)
        with torch.no_grad():
            for piece, twin in zip(model.parameters(), resumed.parameters(), strict=True):
                twin.copy_(piece)
        train(model, many, range(4, 6))
        train(resumed, other, range(4, 6))
        for piece, twin in zip(model.parameters(), resumed.parameters(), strict=True):
            assert torch.equal(whole(piece), whole(twin))


def check_rows_shorter_than_a_block(mesh: DeviceMesh) -> None:
    """Shards of a bias, or of rows shorter than a block, keep float states rather than codes."""
    for states in STATES:
        model = nn.Linear(60, 200)
        fully_shard(model, mesh=mesh)
        optimizer = AdamW(model.parameters(), states=states, min_elements=0)
        model(torch.ones(2, 60)).sum().backward()
        optimizer.step()
        for param in model.parameters():
            assert optimizer.state[param]["exp_avg"].to_local().dtype == torch.float32
            assert not isinstance(optimizer.state[param]["exp_avg"].to_local(), QTensor)


def check_columns_that_are_split(mesh: DeviceMesh) -> None:
    """At borders of blocks, of 256 numbers, shards keep the codes of the whole; split elsewhere, they keep floats."""
    for states in STATES:
        for placement in (Shard(1), _StridedShard(1, split_factor=1)):
            for width, coded in ((512, True), (768, False)):
                alone = nn.Parameter(torch.ones(4, width))
                shards = nn.Parameter(distribute_tensor(torch.ones(4, width), mesh, [placement]))
                one = AdamW([alone], states=states if coded else "float32", min_elements=0)
                many = AdamW([shards], states=states, min_elements=0)
                for _ in range(2):
                    alone.grad = torch.randn(4, width)
                    shards.grad = distribute_tensor(alone.grad, mesh, [placement])
                    one.step()
                    many.step()
                assert isinstance(many.state[shards]["exp_avg"].to_local(), QTensor) == coded
                assert torch.equal(whole(shards), alone)


def check_a_process_with_nothing_of_a_parameter(mesh: DeviceMesh) -> None:
    """One row for two processes, also for a weight in training: one process has no elements."""
    for states in STATES:
        model = nn.Linear(300, 1)
        prepare_(model, "int8-dyn", gradients="int8")
        fully_shard(model, mesh=mesh)
        optimizer = AdamW(model.parameters(), states=states, min_elements=0)
        before = [whole(param).clone() for param in model.parameters()]
        model(torch.ones(2, 300)).sum().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        assert not any(torch.equal(whole(param), old) for param, old in zip(model.parameters(), before, strict=True))


def check_pieces_draw_other_bits(mesh: DeviceMesh) -> None:
    """The parameter is the same on both processes: replicas stay equal, and shards are rounded with different bits, as
    are those that FSDP2 makes over tensor parallelism of the same dimension."""
    for placement, alike in ((Replicate(), True), (Shard(0), False), (_StridedShard(0, split_factor=1), False)):
        param = nn.Parameter(distribute_tensor(torch.ones(2, 64, dtype=torch.bfloat16), mesh, [placement]))
        optimizer = SGD([param], lr=2.0**-9)
        param.grad = torch.ones_like(param)
        optimizer.step()
        pieces = [torch.empty_like(param.to_local()) for _ in range(2)]
        dist.all_gather(pieces, param.to_local())
        assert torch.equal(*pieces) == alike


def check_what_is_refused(mesh: DeviceMesh) -> None:
    """Whatever cannot be right is an error: partial sums, and gradients or states with another placement, also those
    whose shards are on the other process."""
    turned = DeviceMesh("cpu", [1, 0])
    elsewhere = [torch.ones(4, 6)]
    elsewhere += [distribute_tensor(torch.ones(4, 6), *to) for to in ((mesh, [Replicate()]), (turned, [Shard(0)]))]
    param = nn.Parameter(distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)]))
    optimizer = AdamW([param])
    param.grad = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
    optimizer.step()
    state = optimizer.state_dict()
    for grad, said in zip(elsewhere, ("on one process", "(Replicate(),) on", "(Shard(dim=0),) on"), strict=True):
        param.grad = None
        param.grad = grad
        expect(f"its gradient {said}", optimizer.step)
    single = AdamW([nn.Parameter(torch.ones(4, 6))])
    expect("its parameter on one process: both must be placed the same way", lambda: single.load_state_dict(state))
    for value in elsewhere:
        said = "placed the same way" if isinstance(value, DTensor) else "is not: load it by torch.distributed"
        state["state"][0]["exp_avg"] = value
        expect(said, lambda: optimizer.load_state_dict(state))
    partial = nn.Parameter(DTensor.from_local(torch.ones(4, 6), mesh, [Partial()]))
    partial.grad = DTensor.from_local(torch.ones(4, 6), mesh, [Partial()])
    expect("is a sum over processes", AdamW([partial]).step)


def expect(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        call()
