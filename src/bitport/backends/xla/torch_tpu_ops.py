"""torch_tpu (device "tpu", PrivateUse1): ``torch.tpu.pallas.jax_op`` makes an op's JAX function a torch op.

It takes annotated functions of arrays and infers shapes by tracing, so one op is made for every combination of
non-tensor arguments.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch

from bitport.backends.xla import static
from bitport.ops import OPS

_number = itertools.count()


@functools.cache
def _missing() -> str | None:
    absent = [name for name in ("torch_tpu", "jax") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(absent)} not installed: pip install torch_tpu jax" if absent else None


def refuses(*args: Any) -> str | None:
    return _missing()


def kernel(op: str) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        tensors, shape = static.split(args)
        return _torch_op(op, shape)(*tensors)

    return run


@functools.cache
def _torch_op(op: str, shape: tuple[Any, ...]) -> Callable[..., Any]:
    return torch.tpu.pallas.jax_op(f"bitport_jax::{op}_{next(_number)}", annotated(op, shape))  # type: ignore[attr-defined]


def annotated(op: str, shape: tuple[Any, ...]) -> Callable[..., Any]:
    """Return the function of arrays with an annotated signature."""
    from jax import Array

    function = static.of_arrays(op, shape)
    count = sum(arg is static.ARRAY for arg in shape)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(f"array{at}", kind, annotation=Array) for at in range(count)]
    many = OPS[op].schema.endswith("Tensor[]")

    def run(*arrays: Any) -> Any:
        return function(*arrays)

    run.__name__ = function.__name__
    run.__signature__ = inspect.Signature(parameters, return_annotation=list[Array] if many else Array)  # type: ignore[attr-defined]
    return run
