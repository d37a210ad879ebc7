"""bitport's ops in torchax's own table of ops, and its functions of QTensors in place of torch's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from jax import Array
from torch import Tensor

from bitport.backends.xla.functions import FUNCTIONS
from bitport.backends.xla.torchax_import import import_torchax
from bitport.ops import OPS
from bitport.tensor import FUNCTIONS as TORCH_FUNCTIONS
from bitport.tensor import QTensor


@functools.cache
def register() -> ModuleType:
    """torchax, whose environment knows bitport's ops and what torch's functions do with a QTensor."""
    torchax = import_torchax()
    env = torchax.default_env()
    for name, function in FUNCTIONS.items():
        torchax.ops.ops_registry.register_torch_dispatch_op(OPS[name].overload, function, is_user_defined=True)
        env._ops[OPS[name].overload] = torchax.ops.ops_registry.all_aten_ops[OPS[name].overload]
    for torch_function, handler in TORCH_FUNCTIONS.items():
        env.override_op_definition(torch_function, _of_either(env, torch_function, handler))
    return torchax


def _of_either(env: Any, torch_function: Any, handler: Callable[..., Any]) -> Callable[..., Any]:
    """``handler`` where an argument is a QTensor, otherwise what the environment had."""
    known = env._ops.get(torch_function)

    def run(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(arg, QTensor) for arg in (*args, *kwargs.values())):
            with env:
                return handler(*args, **kwargs)
        if known is None:
            raise tensor_module().OperatorNotFound(f"torchax has no {torch_function}")
        if not known.is_jax_function:
            return known.func(*args, **kwargs)
        return env.j2t_iso(known.func(*env.t2j_iso(args), **env.t2j_iso(kwargs)))

    return run


def tensor_module() -> Any:
    import torchax.tensor

    return torchax.tensor


def wrap(array: Array) -> Tensor:
    """The array as a tensor of torchax's, not copied."""
    return tensor_module().Tensor(array, register().default_env())
