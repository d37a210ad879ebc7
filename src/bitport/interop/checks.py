"""Validation of tensors from files before anything is computed from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bitport.errors import CheckpointError
from bitport.numerics import FLOATS, NUMBER_TYPES

FLOAT8 = {NUMBER_TYPES[name].storage: name for name in ("float8_e4m3", "float8_e5m2")}
"""The dtypes of weights in float8 -> their number type."""


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


def fits(value: Tensor, dtype: torch.dtype) -> bool:
    """Whether ``dtype`` represents every number exactly."""
    return bool(((value.to(dtype).to(value.dtype) == value) | value.isnan()).all())
