"""A model of several schemes, and ways to shard it over any number of processes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import bitport

K, N = 192, 131
"""N is prime, so no number of processes divides it evenly."""

RECIPE = bitport.Recipe((bitport.Rule("up", "int4-g32"), bitport.Rule("down", "int8"), bitport.Rule("out", "nvfp4-wo")))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(K, N), nn.LayerNorm(N)
        self.down, self.out = nn.Linear(N, K), nn.Linear(K, 60)
        self.register_buffer("steps", torch.tensor(7))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.down(self.norm(self.up(x)).relu()))


def quantized(seed: int = 0, recipe: bitport.Recipe = RECIPE) -> Model:
    """Return the same model in every process that passes the same ``seed``."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Model()
    bitport.quantize_(model, recipe, measure=False)
    return model


def inputs() -> Tensor:
    return torch.randn(4, K, generator=torch.Generator().manual_seed(1))


def in_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The last layer is split along K, the others along N, with the output gathered after each."""
    plan = {
        "up": ColwiseParallel(output_layouts=Replicate()),
        "down": ColwiseParallel(),
        "out": RowwiseParallel(),
    }
    return parallelize_module(model, mesh, plan)


def by_fsdp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The last layer belongs to the root, whose weights FSDP2 does not reshard after a forward."""
    from torch.distributed.fsdp import fully_shard

    for child in list(model.children())[:-1]:
        fully_shard(child, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def full(model: nn.Module) -> dict[str, Tensor]:
    every = model.state_dict().items()
    return {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in every}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
