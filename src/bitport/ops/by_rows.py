"""Dequantize a weight some rows at a time: as a whole it would take several times its memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bitport.numerics import decibels, numbers_at_once, squares
from bitport.ops.product import operand, run
from bitport.ops.select import GENERIC, decide
from bitport.ops.weight import Weight
from bitport.tensor import QTensor

Place = tuple[int | slice, ...]

DISTANCES: dict[str, Callable[[Tensor, Weight], Tensor | None]] = {}
"""Device type -> function that computes |value|^2 and |value - weight|^2 of one matrix, float64 [2], or returns None if
it does not support the weight; filled by backends."""


def dequantized_rows(q: QTensor) -> Iterator[tuple[Place, Tensor]]:
    """Yield (index, float32 rows) of the matrix [..., N, K] behind ``q``, one matrix of a batch after the other. Rows
    are dequantized by the device's embedding kernel."""
    for at, matrix in _matrices(q):
        for rows, value in _of_matrix(matrix):
            yield (*at, rows), value


def sqnr_from(value: Tensor, q: QTensor) -> Tensor:
    """SQNR in dB of the matrix [..., N, K] behind ``q``, against the ``value`` it was made from."""
    return decibels(*sum((_squares(value[at], matrix) for at, matrix in _matrices(q)), torch.zeros(2, device="cpu")))


def _matrices(q: QTensor) -> Iterator[tuple[tuple[int, ...], QTensor]]:
    batch = q.qdata.shape[: q.dim() - 2] if q.batched else ()
    for at in itertools.product(*map(range, batch)):
        yield at, q[at] if at else q  # type: ignore[misc]


def _squares(value: Tensor, q: QTensor) -> Tensor:
    device = q.qdata.device
    lies_alike = value.device == device and q.perm is None and q.pre_scale is None
    distance = DISTANCES.get(device.type) if lies_alike else None
    found = None if distance is None else distance(value, Weight._make(operand(q)))
    if found is None:
        found = squares((value[rows].to(device), floats) for rows, floats in _of_matrix(q)).cpu()
    return found


def _of_matrix(q: QTensor) -> Iterator[tuple[slice, Tensor]]:
    n, k, device = q.matrix.n, q.matrix.k, q.qdata.device
    count = max(1, numbers_at_once(device) // max(k, 1))
    ids = torch.arange(n, device=device)
    if decide("embedding", ids, *operand(q), torch.float32).kernel.startswith(GENERIC):
        q = q.to_layout("plain")  # once, instead of for each chunk
    for start in range(0, n, count):
        some = slice(start, min(start + count, n))
        yield some, q.in_value_order(run("embedding", ids[some], *operand(q), torch.float32))
