"""DTensors that hold a QTensor: from the whole tensor to the local shard and back.

DTensor is looked up in ``sys.modules``, so that programs without DTensors do not import it. While another thread is
still importing it, no DTensor can exist.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor, nn

from bitport.errors import ArgumentError
from bitport.numerics.packing import as_bytes
from bitport.tensor.borders import check_pieces, cut_along, plain_shapes
from bitport.tensor.qtensor import QTensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a DTensor, even a replicated one."""
    return isinstance(tensor, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def own(tensor: Tensor) -> Tensor:
    """The local part of ``tensor``: an ordinary tensor itself, the shard of a DTensor. Shares its memory."""
    return tensor.detach().to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def is_quantized(tensor: Tensor) -> bool:
    return isinstance(own(tensor), QTensor)


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor. For a DTensor this is a collective: every process of its mesh must call it, unless on meta."""
    if not is_sharded(tensor):
        return tensor
    if tensor.device.type == "meta" and not is_quantized(tensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return tensor.detach().full_tensor()  # type: ignore[attr-defined]


def nbytes_of(tensor: Tensor) -> int:
    """Bytes of the whole tensor, as stored in a checkpoint."""
    q = own(tensor)
    if not is_sharded(tensor) or not isinstance(q, QTensor):
        return tensor.nbytes
    shapes = plain_shapes(q, tensor.shape)
    return sum(math.prod(shape) * getattr(q, name).itemsize for name, shape in shapes.items())


def model_nbytes(model: nn.Module) -> int:
    """Bytes of all parameters, tied ones counted once."""
    return sum(nbytes_of(param) for param in model.parameters())


def sharded_like(tensor: Tensor, shard: Tensor) -> Tensor:
    """A DTensor with local piece ``shard``, sharded like ``tensor``; ``shard`` itself if ``tensor`` is no DTensor."""
    if not is_sharded(tensor):
        return shard
    from torch.distributed.tensor import DTensor

    place = (tensor.device_mesh, tensor.placements)  # type: ignore[attr-defined]
    return DTensor.from_local(shard, *place, run_check=False, shape=tensor.shape, stride=tensor.stride())


def laid_out(value: Tensor, like: Tensor) -> Tensor:
    """Distribute ``value``, which every process has, like ``like``: a DTensor of a copy of the local piece, or
    ``value`` itself if ``like`` is no DTensor."""
    return sharded_like(like, shard_of(value, like).clone()) if is_sharded(like) else value


def shard_of(value: Tensor, like: Tensor) -> Tensor:
    """The local piece of ``value`` when sharded like the DTensor ``like``; a view.

    Each mesh dimension shards what the earlier ones left. A dimension that FSDP2 applies on top of tensor parallelism
    of the same tensor dimension, which torch marks with a split_factor, shards after the others."""
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
    """The plain parts of a QTensor, 8-bit types viewed as uint8; of a DTensor, as DTensors sharded alike."""
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
    """The placement of the part ``name`` on a mesh dimension on which the tensor has the placement ``whole``."""
    from torch.distributed.tensor import Replicate

    at = None if whole.is_replicate() else cut_along(plain, whole.dim).get(name)
    if at is None:
        return Replicate()
    dim = getattr(plain, name).dim() + at
    strided = {"split_factor": whole.split_factor} if hasattr(whole, "split_factor") else {}
    return type(whole)(dim, **strided)
