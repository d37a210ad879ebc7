"""Hooks of FSDP2 (torch.distributed.fsdp.fully_shard) for weights in training.

Shards are float rows of the value, split anywhere; rounding applies to the gathered whole. The value is sent in its own
dtype, regardless of the policy for mixed precision: rounding the numbers of another dtype would train a different model
than convert_ makes. The policy's dtype is the one that the whole shows and that its gradient has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitport.train.aten import implements
from bitport.train.tensor import TrainedTensor, outside_of_products, value_of

aten = torch.ops.aten


@implements(aten.new_zeros.default)
def _new_zeros(func: Any, w: TrainedTensor, size: Sequence[int], **kwargs: Any) -> Tensor:
    """Room for a shard of ``w``, as FSDP2 requests it, if the rows have the same shape; otherwise a float tensor."""
    made = func(w.value, size, **kwargs)
    return w.with_value(made, cut=True) if [*size[1:]] == [*w.shape[1:]] and made.dtype == w.dtype else made


@implements(aten.as_strided.default)
def _as_strided(func: Any, w: TrainedTensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> Tensor:
    """An alias if nothing changes; otherwise a view of the value."""
    if [*size] == [*w.shape] and [*stride] == [*w.stride()] and not offset:
        return w.map_parts(aten.alias.default)
    if w.recorded:
        raise outside_of_products(func)
    return func(value_of(w), size, stride, offset)


def pre_all_gather(
    self: TrainedTensor, mesh: Any, size: torch.Size, stride: Any, module: nn.Module, policy: Any
) -> tuple[tuple[Tensor, ...], Any]:
    """Return (what to gather, the size of the whole). Shards are padded to the longest."""
    missing = -(-size[0] // mesh.size()) - self.shape[0]
    pad = (0, 0) * (self.dim() - 1) + (0, missing)
    return (F.pad(self.value, pad) if missing else self.value,), size


def post_all_gather(
    self: TrainedTensor, outputs: tuple[Tensor, ...], size: torch.Size, dtype: torch.dtype, *, out: Any = None
) -> Any:
    """Return the whole as a view of the memory that FSDP gathers into, and that memory."""
    (gathered,) = outputs
    if out is not None:
        return None
    whole = self.with_value(gathered.narrow(0, 0, size[0]), cut=False, gathered=True)
    return whole.map_beside(lambda part: part.to(gathered.device), whole.value, dtype), (gathered,)


TrainedTensor.fsdp_pre_all_gather = pre_all_gather
TrainedTensor.fsdp_post_all_gather = post_all_gather
