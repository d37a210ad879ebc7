"""Which rows, or columns, of which matrices a parameter of vLLM has.

It holds several matrices of the checkpoint one below the other (q, k and v), of each the part of its process. What goes
where its weight loader knows, in many variants, all written for tensors of one dtype that are copied into a parameter.
So the loader is run on numbers of rows in place of weights; what it leaves in the parameter is the answer.
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
    """``param``, of ``shape``, takes the numbers of what it is given along ``dim``, the only dimension that is not 1
    but for experts. The first number is 1; 0 is what nothing fills. ``load``: the loader, with the arguments that vLLM
    gives it."""

    def __init__(self, shape: tuple[int, ...], dim: int, load: Callable[..., Any]) -> None:
        self.dim, self.load = dim, load
        self.sources: list[Tensor] = []
        self.starts = [1]
        self.param = nn.Parameter(torch.zeros(shape, dtype=torch.float64), requires_grad=False)
        self.param.__dict__.update(output_dim=0, input_dim=1, weight_loader=self._loaded)

    def _loaded(self, param: Tensor, loaded_weight: Tensor, *which: Any, **more: Any) -> Any:
        """Called by models with a whole matrix in place of the loader."""
        start, length = self.starts[-1], loaded_weight.shape[self.dim]
        numbers = torch.arange(start, start + length, dtype=param.dtype, device=param.device)
        self.sources.append(loaded_weight)
        self.starts.append(start + length)
        return self.load(param, numbers.unsqueeze(1 - self.dim), *which, **more)

    def check(self, param: Tensor, what: str) -> None:
        """CheckpointError unless all of ``param`` was filled."""
        empty = int((param == 0).sum())
        if empty:
            along = ("rows", "columns")[self.dim]
            raise CheckpointError(f"the checkpoint does not have {empty} of the {param.numel()} {along} of {what}")

    def pieces(self, param: Tensor) -> Iterator[Tensor]:
        """What ``param``, or one expert's part of it, has of each source, in its order, zeros where nothing is."""
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
