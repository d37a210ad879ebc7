"""Parameters that are DTensors (FSDP2, tensor parallelism): each process steps on its own piece, and keeps the moments
of that piece as DTensors of the same placement, which is what torch.distributed.checkpoint expects of a state.

Codes of a piece are pieces of the codes where the matrix is cut along its rows, or along its columns at the borders of
blocks. Other moments of a DTensor (of a bias, of short rows, of columns cut elsewhere) stay in float32.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bitport.errors import ArgumentError
from bitport.numerics import Format
from bitport.tensor.sharded import is_sharded
from bitport.train.optim.states import kept_shape


def local_of(param: Any, grad: Any) -> tuple[Tensor, Tensor]:
    """The pieces of this process."""
    if not is_sharded(param):
        return param, grad
    if any(placement.is_partial() for placement in param.placements):
        raise ArgumentError(f"a parameter is a sum over processes, {param.placements}: redistribute it before training")
    if not is_sharded(grad) or grad.placements != param.placements or grad.device_mesh != param.device_mesh:
        given = grad.placements if is_sharded(grad) else "on one process"
        raise ArgumentError(
            f"a parameter is placed {param.placements}, its gradient {given}: "
            f"redistribute the gradient, grad.redistribute(param.device_mesh, param.placements)"
        )
    return param.to_local(), grad.to_local()


def piece_of(param: Any) -> tuple[int, ...]:
    """Which of the pieces of ``param`` this process has: they are rounded by other random bits, copies of one by the
    same."""
    if not is_sharded(param):
        return ()
    at = zip(param.device_mesh.get_coordinate(), param.placements, strict=True)
    return tuple(coordinate for coordinate, placement in at if placement.is_shard())


def local_part(value: Any, param: Any = None) -> Any:
    """The piece of a state that belongs to this process; where ``param`` is given, it must lie as that does."""
    if not is_sharded(value):
        if is_sharded(param):
            raise ArgumentError(
                f"a parameter is placed {param.placements}, its saved state is not: load it by "
                f"torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
            )
        return value
    if param is not None and (not is_sharded(param) or value.placements != param.placements):
        placed = param.placements if is_sharded(param) else "on one process"
        raise ArgumentError(
            f"a saved state is placed {value.placements}, its parameter {placed}: both must be placed the same way"
        )
    return value.to_local()


def takes_codes(param: Any, fmt: Format) -> bool:
    """Whether every process can keep codes in the shape of its piece."""
    if not is_sharded(param):
        return True
    shape = list(param.shape)
    for size, placement in zip(param.device_mesh.shape, param.placements, strict=True):
        if placement.is_shard() and placement.dim > 0:
            if shape[placement.dim] % (size * fmt.block[1]):
                return False
            shape[placement.dim] //= size
    return len(shape) > 1 and kept_shape(tuple(shape), fmt) == tuple(shape)
