"""FSDP2 over tensor parallelism, in four processes: run by tests/ranks.py."""

from __future__ import annotations

import torch
import torch._dynamo  # once, before the processes fork
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import bitport
from bitport.checkpoint import ModelState

K, N = 256, 512


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(K, N), nn.Linear(N, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


def check_fsdp_over_tensor_parallelism(mesh: DeviceMesh) -> None:
    """The rows of `up` are split twice, first by tensor parallelism; of `down`, the columns by tensor parallelism and
    the rows by FSDP2."""
    both = init_device_mesh("cpu", (2, mesh.size() // 2), mesh_dim_names=("data", "tensor"))
    for scheme in ("int4-g32", "int8", "nvfp4-wo"):
        block, x = Block(), torch.randn(4, K)
        bitport.quantize_(block, scheme, measure=False)
        y, state = block(x), block.state_dict()
        parallelize_module(block, both["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        split = block(x)
        fully_shard(block, mesh=both["data"])
        assert block.up.weight.to_local().shape == (N // 4, K)
        assert block.down.weight.to_local().shape == (K // 2, N // 2)
        for _ in range(2):
            assert torch.equal(block(x), split)
        # sums of N products of numbers below 10, in two parts: N * 2^-24 of them
        assert (split - y).abs().max() <= N * 2**-24 * 10
        found = {name: tensor.full_tensor() for name, tensor in block.state_dict().items()}
        assert all(torch.equal(found[name], state[name]) for name in state)


def check_a_checkpoint_of_it(mesh: DeviceMesh) -> None:
    both = init_device_mesh("cpu", (2, mesh.size() // 2), mesh_dim_names=("data", "tensor"))

    def built() -> nn.Module:
        block = Block()
        bitport.quantize_(block, "int4-g32", measure=False)
        parallelize_module(block, both["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return fully_shard(block, mesh=both["data"])

    one, other, x = built(), built(), torch.randn(4, K)
    bitport.save(one, "saved")
    bitport.load(other, "saved")
    assert torch.equal(other(x), one(x))
    plain = bitport.load(Block(), "saved")
    found = {name: tensor.full_tensor() for name, tensor in one.state_dict().items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in plain.state_dict().items())


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        value = bitport.quantize_tensor(torch.randn(K, N), "int4-g32", transposed=True)
        self.weight = nn.Parameter(value, requires_grad=False)


def check_a_checkpoint_of_torch_of_it(mesh: DeviceMesh) -> None:
    """When a dimension is split twice, its pieces are not in the order of the processes; also for parts that have that
    dimension in another position than the weight."""
    both = init_device_mesh("cpu", (2, mesh.size() // 2), mesh_dim_names=("data", "tensor"))
    one, fresh = Transposed(), Transposed()
    state = one.weight.detach().clone()
    assert not torch.equal(fresh.weight, state)
    one.weight = nn.Parameter(distribute_tensor(state, both["tensor"], [Shard(0)]), requires_grad=False)
    fully_shard(one, mesh=both["data"])
    dcp.save({"model": ModelState(one)}, checkpoint_id="saved-by-torch")
    dcp.load({"model": ModelState(fresh)}, checkpoint_id="saved-by-torch")
    assert torch.equal(fresh.weight, state)


def check_compiled(mesh: DeviceMesh) -> None:
    block, x = Block(), torch.randn(4, K)
    bitport.quantize_(block, "int4-g32", measure=False)
    parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    y = block(x)
    compiled = torch.compile(block, backend="aot_eager")
    assert (compiled(x) - y).abs().max() <= N * 2**-24 * 10
