"""Validation of tensors from files before anything is computed from them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from bitport.checkpoint.dtypes import name_of
from bitport.errors import ArgumentError, CheckpointError, cut
from bitport.numerics import FLOATS, NUMBER_TYPES

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
POWERS = (torch.uint8, E8M0)
"""The dtypes of scales that are powers of two."""
FLOAT8 = {NUMBER_TYPES[name].storage: name for name in ("float8_e4m3", "float8_e5m2")}
"""The dtypes of weights in float8 -> their number type."""


@contextlib.contextmanager
def within(where: str | Path) -> Iterator[None]:
    """Errors raised inside begin with ``where``, and are of the checkpoint, whatever refused its numbers."""
    try:
        yield
    except (ArgumentError, CheckpointError) as error:
        raise CheckpointError(f"{where}: {cut(str(error))}") from error


def expect(tensor: Tensor, name: str, dtypes: Sequence[torch.dtype], shape: Sequence[int | None]) -> Tensor:
    """``tensor``; CheckpointError with its name unless it has one of ``dtypes`` and this ``shape``, where None allows
    any size of at least 1."""
    fits = tensor.dim() == len(shape) and all(
        size > 0 if wanted is None else size == wanted for size, wanted in zip(tensor.shape, shape, strict=True)
    )
    if tensor.dtype not in dtypes or not fits:
        sizes = ", ".join("any" if wanted is None else str(wanted) for wanted in shape)
        raise CheckpointError(
            f"{name} must be {' or '.join(map(str, dtypes))} [{sizes}], not {tensor.dtype} {list(tensor.shape)}; "
            f"fetch the checkpoint again"
        )
    return tensor


class Stored(dict[str, Tensor]):
    """The tensors of the parameter ``name`` by role, not yet validated. ``names``: role -> name in the files."""

    def __init__(self, name: str, names: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self.name, self.names = name, names

    def expect(self, role: str, dtypes: Sequence[torch.dtype], shape: Sequence[int | None]) -> Tensor:
        """See :func:`expect`."""
        return expect(self[role], self.names[role], dtypes, shape)

    def grid(self, role: str, dtypes: Sequence[torch.dtype], grid: Sequence[int]) -> Tensor:
        """Like :meth:`expect`, and contiguous, for a tensor that files may have without its sizes of one
        (:func:`as_grid`)."""
        return expect(as_grid(self[role], grid), self.names[role], dtypes, grid).contiguous()

    def number(self, role: str) -> Tensor:
        """See :func:`number_in`."""
        return number_in(self[role], self.names[role])


def as_grid(tensor: Tensor, grid: Sequence[int]) -> Tensor:
    """A tensor of one dimension, or none, as ``grid``, of whose sizes some files leave out those of one. Others are
    returned as they are, for :func:`expect`."""
    flat = tensor.dim() < 2 and tensor.numel() == math.prod(grid) and 1 in grid
    return tensor.reshape(*grid) if flat else tensor


def number_in(tensor: Tensor, name: str) -> Tensor:
    """The single number of a tensor of any rank, float32 []."""
    return expect(tensor, name, FLOATS, (1,) * tensor.dim()).float().reshape(())


def dtype_of_all(holds: Callable[[torch.dtype], bool]) -> torch.dtype:
    """The dtype of a model whose files do not say it: the first of bfloat16, float16 and float32 for which ``holds`` is
    true (assumed for float32)."""
    return next((half for half in (torch.bfloat16, torch.float16) if holds(half)), torch.float32)


def order_of(group_of: Tensor, k: int, group: int, what: str) -> Tensor | None:
    """The order that sorts the ``k`` columns by group of ``group`` columns ("act-order"); None if they are sorted
    already."""
    expect(group_of, what, (torch.int32,), (k,))
    wanted = torch.arange(k, dtype=torch.int32) // group
    if torch.equal(group_of, wanted):
        return None
    groups, order = torch.sort(group_of, stable=True)
    if not torch.equal(groups, wanted):
        raise CheckpointError(f"{what} does not give each group {group} columns, which bitport asks for")
    return order.to(torch.int32)


def fits(value: Tensor, dtype: torch.dtype) -> bool:
    """Whether ``dtype`` represents every number exactly."""
    return bool(_kept(value, value.to(dtype)).all())


def exactly(value: Tensor, dtype: torch.dtype, what: str, rounded: bool = True) -> Tensor:
    """``value`` cast to ``dtype``; ArgumentError if that changes a number. ``rounded``: whether the error may suggest
    to round it during conversion (bitport.interop.scales)."""
    cast = value.to(dtype)
    kept = _kept(value, cast)
    if not bool(kept.all()):
        at = int((~kept).flatten().nonzero()[0])
        name = name_of(dtype)
        raise ArgumentError(
            f"{what}: {value.flatten()[at].item():g} ({value.dtype}) is no {name}"
            + (f"; --scales {name} rounds it" if rounded else "")
        )
    return cast


def _kept(value: Tensor, cast: Tensor) -> Tensor:
    """Which numbers of ``value`` are still the same in ``cast``."""
    return (cast.to(value.dtype) == value) | (cast.isnan() & value.isnan())
