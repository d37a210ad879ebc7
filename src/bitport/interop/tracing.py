"""Tracing of a function of another library that maps the tensors of a file to those of a model, to find which numbers
of the file each tensor of the model consists of.

The function is run once, on tensors without data. All of them are views of one address space, a meta tensor that no
memory could hold; the offset and strides of whatever the function renames, slices and reshapes tell what it is. A
concatenation gets a new address::

    qkv                            [6, 4] at 0
    q, k, v = qkv.chunk(3)         k is [2, 4] at 8: the numbers 8 to 16 of qkv
    torch.cat([k, q])              [4, 4] at 24: the numbers 8 to 16 of qkv, then 0 to 8
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

SIZE = 1 << 60
"""Number of elements in the address space."""
JOINS = (torch.cat, torch.concat, torch.concatenate)


class Run(NamedTuple):
    """A range of elements of the tensor ``name``, in row-major order."""

    name: str
    first: int
    end: int


class TracedTensor(NamedTuple):
    """``runs``: its elements, in order; None if it does not consist of runs of the file (sums, columns, transposed)."""

    shape: tuple[int, ...]
    runs: tuple[Run, ...] | None


def traced(
    function: Callable[[dict[str, Tensor]], Mapping[str, Any]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, TracedTensor]:
    """The tensors that ``function`` returns for tensors of these ``shapes``, by name."""
    space = Space()
    given = {name: space.place(shape, (Run(name, 0, math.prod(shape)),)) for name, shape in shapes.items()}
    with space:
        made = function(given)
    modified = bool(space.base._version)  # in place
    return {
        name: TracedTensor(tuple(value.shape), None if modified else space.runs(value))
        for name, value in made.items()
        if isinstance(value, Tensor)
    }


def in_rows(runs: tuple[Run, ...], row: int) -> bool:
    """Whether each run is whole rows of ``row`` elements."""
    return all(run.first % row == run.end % row == 0 for run in runs)


class Space(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.base = torch.empty(SIZE, dtype=torch.bfloat16, device="meta")
        self.end = 0
        self.starts: list[int] = []
        self.held: list[tuple[Run, ...]] = []
        """The runs that each placed tensor consists of."""

    def place(self, shape: tuple[int, ...], runs: tuple[Run, ...]) -> Tensor:
        start, self.end = self.end, self.end + math.prod(shape)
        self.starts.append(start)
        self.held.append(runs)
        return self.base[start : self.end].view(shape)

    def runs(self, tensor: Tensor) -> tuple[Run, ...] | None:
        """See :class:`TracedTensor`."""
        inside = tensor.untyped_storage().nbytes() == self.base.untyped_storage().nbytes()
        if not inside or tensor.dtype != self.base.dtype or not tensor.is_contiguous():
            return None
        at = int(tensor.storage_offset())
        place = bisect.bisect_right(self.starts, at) - 1
        skip, left = at - self.starts[place], tensor.numel()
        found = []
        for name, first, end in self.held[place]:
            run = Run(name, min(first + skip, end), min(first + skip + left, end))
            skip, left = max(0, skip - (end - first)), left - (run.end - run.first)
            found += [run] if run.end > run.first else []
        return None if left else tuple(found)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return self._joined(made, *args, **(kwargs or {})) if func in JOINS else made

    def _joined(self, made: Tensor, tensors: Any, dim: int = 0) -> Tensor:
        runs = [self.runs(tensor) for tensor in tensors]
        known = [each for each in runs if each is not None]
        below = dim in (0, -made.dim()) and len(known) == len(runs)
        return self.place(tuple(made.shape), tuple(itertools.chain(*known))) if below else made
