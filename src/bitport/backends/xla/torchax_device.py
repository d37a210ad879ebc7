"""torchax's device for the conformance suite: ops on tensors copied from the CPU, eager and compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import torch
from jax import Array
from torch import Tensor

from bitport.backends.xla.move import op_arrays, to_tensor
from bitport.backends.xla.static import ARRAY, split
from bitport.backends.xla.torchax_register import register, wrap
from bitport.ops import OPS
from bitport.ops.outside import Outside


def torchax_device(refuses: Callable[..., str | None]) -> Outside:
    library = f"jax {jax.__version__}, torchax {register().__version__}"
    kernels = {"jax": _eager, "jax.jit": _compiled}
    return Outside(
        f"torchax, XLA:{jax.default_backend().upper()}",
        library,
        {name: functools.partial(_there_and_back, compute) for name, compute in kernels.items()},
        refuses,
    )


def _there_and_back(compute: Callable[..., Any], op: str, *args: Any) -> Any:
    arrays, others = split(op_arrays(OPS[op], args), Array)
    return _back(compute(op, others, *arrays), OPS[op].fake(*args))


def _eager(op: str, others: tuple[Any, ...], *arrays: Array) -> Any:
    torchax, given = register(), iter(arrays)
    with torchax.default_env():
        result = OPS[op].overload(*(wrap(next(given)) if arg is ARRAY else arg for arg in others))
    return torchax.interop.jax_view(result)


def _compiled(op: str, others: tuple[Any, ...], *arrays: Array) -> Any:
    """Compile as a new function, so that its program is freed with it: there are thousands."""
    return jax.jit(functools.partial(_eager, op, others))(*arrays)


def _back(result: Any, promised: Any) -> Any:
    """Return ``result`` on the CPU, with bytes viewed as the 8-bit floats that the op's fake kernel promises."""
    if isinstance(promised, list):
        return [_back(*pair) for pair in zip(result, promised, strict=True)]
    tensor: Tensor = to_tensor(result)
    floats = promised.is_floating_point() and promised.dtype.itemsize == 1
    return tensor.view(promised.dtype) if floats and tensor.dtype == torch.uint8 else tensor
