"""An op's JAX function as a function of its arrays alone, for libraries that pass nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

ARRAY = object()
"""Stands where a tensor goes."""


def split(args: tuple[Any, ...], kind: type = Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(those of ``args`` that are of a kind, all the arguments with ARRAY for each of them)."""
    tensors = tuple(arg for arg in args if isinstance(arg, kind))
    return tensors, tuple(ARRAY if isinstance(arg, kind) else arg for arg in args)


@functools.cache
def of_arrays(op: str, shape: tuple[Any, ...]) -> Callable[..., Any]:
    """The same function for the same arguments, so that what is compiled for it is found again."""
    from bitport.backends.xla.functions import FUNCTIONS

    function = FUNCTIONS[op]

    def run(*arrays: Any) -> Any:
        given = iter(arrays)
        return function(*(next(given) if arg is ARRAY else arg for arg in shape))

    run.__name__ = f"bitport_{op}"
    return run
