"""Determine which rows or columns of which matrices make up a vLLM parameter.

A parameter holds this process's part of several matrices of the checkpoint, stacked (q, k and v). The placement is
known only to its weight loader, of which there are many variants, all written for tensors of one dtype that are copied
into a parameter. So the loader is run on row numbers in place of weights; what it leaves in the parameter is the
answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitport.errors import CheckpointError
from bitport.tensor import QTensor
from bitport.tensor.join import padded


class Numbered:
    """``param``, of ``shape``, receives the numbers of its sources along ``dim``, the only dimension that is not 1,
    apart from experts. Numbers start at 1; 0 marks unfilled elements. ``load``: the loader that vLLM provides."""

    def __init__(self, shape: tuple[int, ...], dim: int, load: Callable[..., Any]) -> None:
        self.dim, self.load = dim, load
        self.sources: list[Tensor] = []
        self.starts = [1]
        self.param = nn.Parameter(torch.zeros(shape, dtype=torch.float64), requires_grad=False)
        self.param.__dict__.update(output_dim=0, input_dim=1, weight_loader=self._loaded)

    def _loaded(self, param: Tensor, loaded_weight: Tensor, *which: Any, **more: Any) -> Any:
        """Called by models, with a whole matrix, as the loader."""
        start, length = self.starts[-1], loaded_weight.shape[self.dim]
        numbers = torch.arange(start, start + length, dtype=param.dtype, device=param.device)
        self.sources.append(loaded_weight)
        self.starts.append(start + length)
        return self.load(param, numbers.unsqueeze(1 - self.dim), *which, **more)

    def check(self, param: Tensor, what: str) -> None:
        """CheckpointError unless ``param`` was filled entirely."""
        empty = int((param == 0).sum())
        if empty:
            along = ("rows", "columns")[self.dim]
            raise CheckpointError(f"the checkpoint does not have {empty} of the {param.numel()} {along} of {what}")

    def pieces(self, param: Tensor) -> Iterator[Tensor]:
        """The pieces of each source in ``param``, or in one expert's part of it, in order, zero-padded where
        unfilled."""
        numbers = param.flatten().cpu().long()
        source = torch.bucketize(numbers, torch.tensor(self.starts), right=True) - 1
        goes_on = (source[1:] == source[:-1]) & ((numbers[1:] == numbers[:-1] + 1) | (source[1:] < 0))
        borders = [0, *(torch.nonzero(~goes_on).flatten() + 1).tolist(), len(numbers)]
        runs = [(int(source[at]), int(numbers[at]), end - at) for at, end in itertools.pairwise(borders)]
        if runs[0][0] < 0:
            runs = [(0, self.starts[0], 0), *runs]
        for (index, number, length), (after, _, zeros) in zip(runs, [*runs[1:], (0, 0, 0)], strict=True):
            if index >= 0:
                piece = self.sources[index].narrow(self.dim, number - self.starts[index], length)
                yield filled_up(piece, self.dim, length + zeros) if after < 0 else piece


def filled_up(tensor: Tensor, dim: int, size: int) -> Tensor:
    if isinstance(tensor, QTensor):
        return padded(tensor, dim, size)
    behind = [0] * (2 * (tensor.dim() - 1 - dim) + 1)
    return F.pad(tensor, [*behind, size - tensor.shape[dim]])
