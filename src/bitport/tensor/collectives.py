"""The collectives that DTensor runs on a QTensor to shard or gather it, applied to its plain parts.

The packed bytes of codes and scales are sent. Each call blocks until all parts have arrived, so that no tensor is read
with some parts missing; a tensor in a packed layout can only be filled then anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitport.numerics.packing import as_bytes
from bitport.tensor.aten import fill, same_bits
from bitport.tensor.borders import axis_of, cut_along, is_conv, unit
from bitport.tensor.join import join
from bitport.tensor.qtensor import ATEN, QTensor


def _parts(q: QTensor) -> list[Tensor]:
    return [as_bytes(getattr(q, name)).contiguous() for name in q.__tensor_flatten__()[0]]


def _received(target: QTensor, send: Any) -> Any:
    """Let ``send(part, index)`` fill every part of a plain copy of ``target``, then copy that into ``target``."""
    plain = target.to_layout("plain").map_parts(lambda part: part.clone(memory_format=torch.contiguous_format))
    for index, part in enumerate(_parts(plain)):
        _, work = send(part, index)
        work.wait()
    fill(target, plain)
    target.received = True
    return work


def _broadcast(func: Any, tensors: list[QTensor], group: Any, root: int, root_tensor: int, *rest: Any) -> Any:
    (target,) = tensors
    work = _received(target, lambda part, index: func([part], group, root, root_tensor, *rest))
    return tensors, work


def _scatter(func: Any, outputs: list[QTensor], inputs: list[list[QTensor]], group: Any, root: int, *rest: Any) -> Any:
    (target,) = outputs
    given = [[_parts(piece.to_layout("plain")) for piece in pieces] for pieces in inputs]
    work = _received(
        target,
        lambda part, index: func([part], [[piece[index] for piece in pieces] for pieces in given], group, root, *rest),
    )
    return outputs, work


def _all_gather(func: Any, q: QTensor, world: int, group: Any) -> QTensor:
    """Concatenate the pieces of all ranks along dim 0; torch splits them again to concatenate along another dimension.
    If they cannot form one tensor along dim 0 (permuted columns, short blocks in the middle, or they differ in what is
    cut along another dimension), the result is on meta: it can only be split again."""
    plain = q.to_layout("plain")
    wait = torch.ops._c10d_functional.wait_tensor.default
    names = plain.__tensor_flatten__()[0]
    wrap = getattr(torch.ops._c10d_functional, "_wrap_tensor_autograd", None)
    if wrap is not None:  # only defined once torch has imported the caller of this function
        ATEN[wrap.default] = _wait
    every = {}
    for name, part in zip(names, _parts(plain), strict=True):
        every[name] = wait(func(part.reshape(-1), world, group)).view(world, *part.shape)
    pieces = tuple(
        plain.with_parts({name: every[name][rank].view(getattr(plain, name).dtype) for name in names})
        for rank in range(world)
    )
    permuted = axis_of(plain, 0) == "k" and plain.perm is not None and world > 1
    others = () if is_conv(plain) else (cut_along(plain, dim) for dim in range(1, plain.dim()))
    elsewhere = {name for cut in others for name in cut} - cut_along(plain, 0).keys()
    differ = any(not same_bits(every[name][rank], every[name][0]) for name in elsewhere for rank in range(world))
    if permuted or plain.shape[0] % unit(plain, 0) or differ:
        whole = plain.map_parts(lambda part: part.to("meta"), shape=(plain.shape[0] * world, *plain.shape[1:]))
    else:
        whole = join(pieces, 0).to_device_layout()
    whole.pieces, whole.received = pieces, True
    return whole


def _wait(func: Any, q: QTensor) -> QTensor:
    return q


if torch.distributed.is_available():
    ATEN[torch.ops.c10d.broadcast_.default] = _broadcast
    ATEN[torch.ops.c10d.scatter_.default] = _scatter
    ATEN[torch.ops._c10d_functional.all_gather_into_tensor.default] = _all_gather
    ATEN[torch.ops._c10d_functional.wait_tensor.default] = _wait
