"""F.embedding_bag over a table that is no float tensor: its rows are looked up, and torch's own joins them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """The rows [T, K] of all T ids are a table of their own, whose bags have the ids 0 .. T - 1 in order. A padding's
    row comes before them, and torch leaves row 0 out."""
    ids = input.flatten()
    order, padding = torch.arange(ids.shape[0], dtype=input.dtype, device=input.device), None
    if padding_idx is not None:
        row, padding = padding_idx if padding_idx >= 0 else padding_idx + weight.shape[0], 0
        order, ids = torch.where(ids == row, padding, order + 1), F.pad(ids, (1, 0), value=row)
    rows = F.embedding(ids, weight, None, max_norm, norm_type, scale_grad_by_freq, sparse)
    return F.embedding_bag(
        order.view(input.shape),
        rows,
        offsets,
        mode=mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
        padding_idx=padding,
    )
