"""A quantized weight as floats, some of its rows at a time: the whole of it would take several times its memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from bitport.numerics import numbers_at_once
from bitport.ops.product import operand, run
from bitport.ops.select import GENERIC, decide
from bitport.tensor import QTensor

Place = tuple[int | slice, ...]


def dequantized_rows(q: QTensor) -> Iterator[tuple[Place, Tensor]]:
    """Rows of the matrix [..., N, K] behind ``q`` in float32, and which they are: those of one matrix after those of
    another. They are looked up, by the kernel that embedding has on the device."""
    batch = q.qdata.shape[: q.dim() - 2] if q.batched else ()
    for at in itertools.product(*map(range, batch)):
        for rows, value in _of_matrix(q[at]):  # type: ignore[arg-type]  # q[()] is q
            yield (*at, rows), value


def _of_matrix(q: QTensor) -> Iterator[tuple[slice, Tensor]]:
    n, k, device = q.matrix.n, q.matrix.k, q.qdata.device
    count = max(1, numbers_at_once(device) // max(k, 1))
    ids = torch.arange(n, device=device)
    if decide("embedding", ids, *operand(q), torch.float32).kernel.startswith(GENERIC):
        q = q.to_layout("plain")  # once, not for each of them
    for start in range(0, n, count):
        some = slice(start, min(start + count, n))
        yield some, q.in_value_order(run("embedding", ids[some], *operand(q), torch.float32))
