"""Parameters that are DTensors (FSDP2, tensor parallelism): each process updates its own shard, and keeps the moments
of that shard as DTensors with the same placement, as torch.distributed.checkpoint expects.

A shard of a matrix has a shard of its codes if it is split along rows, or along columns at block boundaries. Other
moments of a DTensor (of a bias, short rows, or columns split elsewhere) stay in float32.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bitport.errors import ArgumentError
from bitport.numerics import Format
from bitport.tensor.sharded import is_sharded
from bitport.train.optim.states import kept_shape


def local_of(param: Any, grad: Any) -> tuple[Tensor, Tensor]:
    """The local shards of a parameter and its gradient."""
    if not is_sharded(param):
        return param, grad
    if any(placement.is_partial() for placement in param.placements):
        raise ArgumentError(f"a parameter is a sum over processes, {param.placements}: redistribute it before training")
    if not _alike(grad, param):
        raise ArgumentError(
            f"a parameter is placed {_place(param)}, its gradient {_place(grad)}: place the gradient the same way, by "
            f"grad.redistribute(placements=param.placements) on one mesh, otherwise by "
            f"torch.distributed.tensor.distribute_tensor"
        )
    return param.to_local(), grad.to_local()


def _alike(one: Any, other: Any) -> bool:
    """Whether both are DTensors whose shards are on the same processes."""
    both = is_sharded(one) and is_sharded(other)
    return both and one.placements == other.placements and one.device_mesh == other.device_mesh


def _place(value: Any) -> str:
    return f"{value.placements} on {value.device_mesh}" if is_sharded(value) else "on one process"


def _cuts(placement: Any) -> bool:
    """Whether it divides a dimension. FSDP2 over tensor parallelism has placements of which is_shard() is False."""
    return hasattr(placement, "dim")


def piece_of(param: Any) -> tuple[int, ...]:
    """The index of this process's shard of ``param``: different shards are rounded with different random bits, replicas
    with the same."""
    if not is_sharded(param):
        return ()
    at = zip(param.device_mesh.get_coordinate(), param.placements, strict=True)
    return tuple(coordinate for coordinate, placement in at if _cuts(placement))


def local_part(value: Any, param: Any = None) -> Any:
    """The local shard of a state; if ``param`` is given, it must be placed the same way."""
    if not is_sharded(value):
        if is_sharded(param):
            raise ArgumentError(
                f"a parameter is placed {_place(param)}, its saved state is not: load it by "
                f"torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
            )
        return value
    if param is not None and not _alike(value, param):
        raise ArgumentError(
            f"a saved state is placed {_place(value)}, its parameter {_place(param)}: both must be placed the same way"
        )
    return value.to_local()


def takes_codes(param: Any, fmt: Format) -> bool:
    """Whether every process can keep codes in the shape of its shard."""
    if not is_sharded(param):
        return True
    shape = list(param.shape)
    for size, placement in zip(param.device_mesh.shape, param.placements, strict=True):
        if _cuts(placement) and placement.dim > 0:
            if shape[placement.dim] % (size * fmt.block[1]):
                return False
            shape[placement.dim] //= size
    return kept_shape(tuple(shape), fmt) == tuple(shape)
