"""What FSDP2 (torch.distributed.fsdp.fully_shard) asks of a tensor that it shards by rows.

A shard stays in the plain layout. Over the wire goes what was cut of each part (qdata, scale, zero), byte for byte;
what all shards share is at hand. The gathered parts are views of FSDP's own buffers. For a device that wants another
layout they are packed after each gathering, into the same memory each time: a product may have kept it for its
gradient.

Shards may be uneven: each is sent as long as the longest, and with it the number of its rows. torch offers the first
hook in two forms, and where shards are uneven the longer one demands floats to be sent; this is the shorter one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitport.numerics.packing import as_bytes
from bitport.tensor import versions
from bitport.tensor.borders import cut_along, matrix_like, plain_shapes
from bitport.tensor.join import padded
from bitport.tensor.qtensor import PARTS, QTensor


def pre_all_gather(self: QTensor, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
    """(what to gather, what to hand on). A process alone has it all, and of several inputs torch would then forget all
    but the first."""
    if mesh.size() == 1:
        return (torch.tensor([self.shape[0]], device=self.qdata.device),), None
    plain = padded(self, 0, self.room) if self.shape[0] < self.room else self.to_layout("plain")
    rows = torch.tensor([self.shape[0]], device=plain.qdata.device)
    return (*(as_bytes(getattr(plain, name)).contiguous() for name in cut_along(plain, 0)), rows), None


def post_all_gather(
    self: QTensor, outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None
) -> Any:
    """(the whole tensor, the memory that FSDP has to free and to bring back beside its own); or fills ``out``, which
    was made so before. ``dtype``: that of the whole as it shows itself; no stored number changes."""
    *gathered, rows = outputs
    n = int(rows.sum()) if out is None else out.shape[0]
    shape = (n, *self.shape[1:])
    matrix = matrix_like(self, shape)
    plain, shapes = self.to_layout("plain"), plain_shapes(self, shape)
    parts = {name: getattr(plain, name) for name in PARTS}
    theirs = {part.untyped_storage().data_ptr() for part in (*outputs, *parts.values()) if part is not None}
    for (name, at), part in zip(cut_along(plain, 0).items() if gathered else (), gathered, strict=True):
        first = part.dim() + at == 0  # else the weight lies as [K, N], and its columns are what FSDP takes for rows
        joined = part if first else torch.cat(part.chunk(len(rows)), at)
        cut = joined.view(parts[name].dtype).narrow(at, 0, shapes[name][at])
        parts[name] = cut if first else cut.clone(memory_format=torch.contiguous_format)
    whole = plain.with_parts(parts, shape=shape, matrix=matrix, dtype=dtype)
    whole.room = 0
    packed = whole.to_device_layout()
    ours = {name: part for name in PARTS if (part := getattr(packed, name)) is not None}
    fresh = [name for name, part in ours.items() if part.untyped_storage().data_ptr() not in theirs]
    if out is None:
        ours |= {name: _alone(ours[name]) for name in fresh}
        return packed.with_parts(ours), tuple(ours[name] for name in fresh)
    target = out if isinstance(out, QTensor) else out.to_local()  # type: ignore[attr-defined]
    for name, part in ours.items():
        there = getattr(target, name)
        versions.leave_uncounted(there)
        if there.data_ptr() != part.data_ptr():  # packed anew, or shared by all shards and replaced since then
            with torch.autograd._unsafe_preserve_version_counter(there):
                there.copy_(part)
    return None


def _alone(part: Tensor) -> Tensor:
    """With memory of just its size, which is what FSDP frees and brings back."""
    return part if part.untyped_storage().nbytes() == part.nbytes else part.clone(memory_format=torch.contiguous_format)


QTensor.fsdp_pre_all_gather = pre_all_gather
QTensor.fsdp_post_all_gather = post_all_gather
