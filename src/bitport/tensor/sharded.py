"""DTensors that hold a QTensor: what of it a process has, and back.

DTensor is looked for among the modules that are loaded: nobody who has none pays for importing it. While another thread
imports it, there is none yet.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor

from bitport.errors import ArgumentError
from bitport.numerics.packing import as_bytes
from bitport.tensor.borders import check_pieces, cut_along, plain_shapes
from bitport.tensor.qtensor import QTensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a DTensor, be it replicated."""
    return isinstance(tensor, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def own(tensor: Tensor) -> Tensor:
    """What this process has of it: all of an ordinary tensor, the shard of a DTensor. It shares its memory."""
    return tensor.detach().to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def is_quantized(tensor: Tensor) -> bool:
    return isinstance(own(tensor), QTensor)


def whole(tensor: Tensor) -> Tensor:
    """All of it. Every process of a DTensor's mesh must ask, unless it is on meta."""
    if not is_sharded(tensor):
        return tensor
    if tensor.device.type == "meta" and not is_quantized(tensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return tensor.detach().full_tensor()  # type: ignore[attr-defined]


def nbytes_of(tensor: Tensor) -> int:
    """Bytes of all of it: what a checkpoint holds."""
    q = own(tensor)
    if not is_sharded(tensor) or not isinstance(q, QTensor):
        return tensor.nbytes
    shapes = plain_shapes(q, tensor.shape)
    return sum(math.prod(shape) * getattr(q, name).itemsize for name, shape in shapes.items())


def sharded_like(tensor: Tensor, shard: Tensor) -> Tensor:
    """A DTensor laid out like ``tensor``, whose local piece is ``shard``; ``shard`` itself if ``tensor`` is no
    DTensor."""
    if not is_sharded(tensor):
        return shard
    from torch.distributed.tensor import DTensor

    place = (tensor.device_mesh, tensor.placements)  # type: ignore[attr-defined]
    return DTensor.from_local(shard, *place, run_check=False, shape=tensor.shape, stride=tensor.stride())


def laid_out(value: Tensor, like: Tensor) -> Tensor:
    """``value``, which every process has, as ``like`` lies: itself, or a DTensor of a copy of this process's piece."""
    return sharded_like(like, shard_of(value, like).clone()) if is_sharded(like) else value


def shard_of(value: Tensor, like: Tensor) -> Tensor:
    """The piece of ``value`` that this process would have if it lay as the DTensor ``like`` does; a view.

    A mesh dimension cuts what the earlier ones have left. One that FSDP2 lays over tensor parallelism of the same
    dimension, which torch marks with a split_factor, cuts after the others."""
    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ArgumentError(f"this process is not in the mesh {mesh} of the tensor whose shard it should hold")
    for at in sorted(range(mesh.ndim), key=lambda at: hasattr(placements[at], "split_factor")):
        if placements[at].is_partial():
            raise ArgumentError(f"a value cannot be cut into the terms of a sum, which {placements[at]} asks for")
        if placements[at].is_replicate():
            continue
        dim, total = placements[at].dim, value.shape[placements[at].dim]
        size = -(-total // mesh.size(at))
        if isinstance(value, QTensor):
            check_pieces(value, dim, size)
        start = min(coordinate[at] * size, total)
        value = value.narrow(dim, start, min(size, total - start))
        if isinstance(value, QTensor) and dim == 0:
            value.room = size
    return value


def parts_of(tensor: Tensor) -> dict[str, Tensor]:
    """The plain parts of a QTensor, or of a DTensor of one: then as DTensors, cut as it is; 8-bit types as uint8."""
    q = own(tensor)
    assert isinstance(q, QTensor)
    plain = q.to_layout("plain")
    parts = {name: as_bytes(getattr(plain, name)) for name in plain.__tensor_flatten__()[0]}
    if not is_sharded(tensor):
        return parts
    from torch.distributed.tensor import DTensor

    mesh, shapes = tensor.device_mesh, plain_shapes(plain, tensor.shape)  # type: ignore[attr-defined]
    result: dict[str, Tensor] = {}
    for name, part in parts.items():
        shape = torch.Size(shapes[name])
        placements = [_placement(plain, name, each) for each in tensor.placements]  # type: ignore[attr-defined]
        stride = torch.empty(shape, device="meta").stride()
        result[name] = DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)
    return result


def _placement(plain: QTensor, name: str, whole: Any) -> Any:
    """How the part ``name`` lies over a mesh dimension over which the tensor lies as ``whole``."""
    from torch.distributed.tensor import Replicate

    at = None if whole.is_replicate() else cut_along(plain, whole.dim).get(name)
    if at is None:
        return Replicate()
    dim = getattr(plain, name).dim() + at
    strided = {"split_factor": whole.split_factor} if hasattr(whole, "split_factor") else {}
    return type(whole)(dim, **strided)
