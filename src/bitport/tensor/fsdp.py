"""The hooks of FSDP2 (torch.distributed.fsdp.fully_shard) for a tensor sharded by rows.

A shard stays in the plain layout. The sharded parts (qdata, scale, zero) are sent byte for byte; parts shared by all
shards are already local. The gathered parts are views of FSDP's own buffers. If the device prefers another layout they
are packed after each all-gather, into the same memory each time, because autograd may have saved it for backward.

Shards may be uneven: each is padded to the longest and sent along with its row count. torch accepts the first hook with
two signatures; for uneven shards the longer one requires float inputs, so this is the shorter one.
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
    """(tensors to gather, metadata). With a single process nothing need be gathered, and of several inputs torch would
    drop all but the first."""
    if mesh.size() == 1:
        return (torch.tensor([self.shape[0]], device=self.qdata.device),), None
    plain = padded(self, 0, self.room) if self.shape[0] < self.room else self.to_layout("plain")
    rows = torch.tensor([self.shape[0]], device=plain.qdata.device)
    return (*(as_bytes(getattr(plain, name)).contiguous() for name in cut_along(plain, 0)), rows), None


def post_all_gather(
    self: QTensor, outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None
) -> Any:
    """Return (the whole tensor, memory beside FSDP's own that FSDP must free and reallocate), or refill ``out``, the
    result of an earlier call. ``dtype``: the nominal dtype of the whole; stored values do not change."""
    *gathered, rows = outputs
    n = int(rows.sum()) if out is None else out.shape[0]
    shape = (n, *self.shape[1:])
    matrix = matrix_like(self, shape)
    plain, shapes = self.to_layout("plain"), plain_shapes(self, shape)
    parts = {name: getattr(plain, name) for name in PARTS}
    theirs = {part.untyped_storage().data_ptr() for part in (*outputs, *parts.values()) if part is not None}
    for (name, at), part in zip(cut_along(plain, 0).items() if gathered else (), gathered, strict=True):
        first = part.dim() + at == 0  # otherwise the weight is [K, N], and what FSDP takes for rows are its columns
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
        if there.data_ptr() != part.data_ptr():  # repacked, or shared by all shards and replaced in the meantime
            with torch.autograd._unsafe_preserve_version_counter(there):
                there.copy_(part)
    return None


def _alone(part: Tensor) -> Tensor:
    """``part`` in a storage of exactly its size, which FSDP frees and reallocates."""
    return part if part.untyped_storage().nbytes() == part.nbytes else part.clone(memory_format=torch.contiguous_format)


QTensor.fsdp_pre_all_gather = pre_all_gather
QTensor.fsdp_post_all_gather = post_all_gather
