"""An op's JAX function as a function of its arrays alone, for libraries that accept nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

ARRAY = object()
"""Placeholder for a tensor."""


def split(args: tuple[Any, ...], kind: type = Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return (the arguments of type ``kind``, all arguments with ARRAY in place of these)."""
    tensors = tuple(arg for arg in args if isinstance(arg, kind))
    return tensors, tuple(ARRAY if isinstance(arg, kind) else arg for arg in args)


@functools.lru_cache(4096)  # bounded: attention has another n at each step
def of_arrays(op: str, shape: tuple[Any, ...]) -> Callable[..., Any]:
    """Return the function of the arrays; it is cached, so that what was compiled for it is found again."""
    from bitport.backends.xla.functions import FUNCTIONS

    function = FUNCTIONS[op]

    def run(*arrays: Any) -> Any:
        given = iter(arrays)
        return function(*(next(given) if arg is ARRAY else arg for arg in shape))

    run.__name__ = f"bitport_{op}"
    return run
