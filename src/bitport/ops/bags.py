"""F.embedding_bag over a table that is not a float tensor: look up its rows, then reduce them by torch's own op."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bitport.errors import ArgumentError

MODES = ("sum", "mean", "max")
"""In the order of torch's mode numbers."""


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
    """F.embedding_bag on the looked-up rows [T, K] of all T ids as a new table, whose bags hold the ids 0 .. T - 1 in
    order. A padding row is prepended, and row 0 is then passed to torch as padding_idx.

    Calls the op below F.embedding_bag, because F.embedding_bag compares padding_idx with the number of rows, which
    would make that number a constant of a traced program."""
    _check(input, offsets, mode, per_sample_weights)
    ids = input.flatten()
    if offsets is None:
        offsets = torch.arange(input.shape[0], dtype=input.dtype, device=input.device) * input.shape[1]
    order, padding = torch.arange(ids.shape[0], dtype=input.dtype, device=input.device), -1
    if padding_idx is not None:
        row, padding = padding_row(padding_idx, weight.shape[0]), 0
        order, ids = torch.where(ids == row, padding, order + 1), F.pad(ids, (1, 0), value=row)
    rows = F.embedding(ids, weight, None, max_norm, norm_type, scale_grad_by_freq, sparse)
    weights = None if per_sample_weights is None else per_sample_weights.flatten()
    joined = torch.ops.aten._embedding_bag
    return joined(rows, order, offsets, False, MODES.index(mode), False, weights, include_last_offset, padding)[0]


def padding_row(at: int, n: int) -> int:
    """Resolve a padding_idx, which counts from the end if negative."""
    if not -n <= at < n:
        raise ArgumentError(f"padding_idx is a row of the table, {-n} to {n - 1}, not {at}")
    return at % n


def _check(ids: Tensor, offsets: Tensor | None, mode: str, weights: Tensor | None) -> None:
    starts = None if offsets is None else [*offsets.shape]
    if not (ids.dim() == 2 and starts is None) and not (ids.dim() == 1 and starts is not None and len(starts) == 1):
        raise ArgumentError(
            f"ids are [bags, ids of each] without offsets, or [ids] with offsets [bags], not {[*ids.shape]} with "
            f"{'none' if starts is None else starts}"
        )
    if mode not in MODES:
        raise ArgumentError(f"the mode of a bag is {', '.join(MODES)}, not {mode!r}")
    if weights is not None and (mode != "sum" or weights.shape != ids.shape):
        raise ArgumentError(
            f"per_sample_weights are for the mode sum and have the shape of the ids, {[*ids.shape]}; "
            f"they are {[*weights.shape]} here, the mode is {mode}"
        )
