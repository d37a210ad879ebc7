"""Register bitport's ops in torchax's table of ops, and what torch functions and aten ops do with a QTensor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from jax import Array
from torch import Tensor
from torch.utils import _pytree as pytree

from bitport.backends.xla.functions import FUNCTIONS
from bitport.backends.xla.torchax_import import import_torchax
from bitport.backends.xla.torchax_lowerings import LOWERINGS, cut
from bitport.ops import OPS
from bitport.tensor import ATEN, QTensor
from bitport.tensor import FUNCTIONS as TORCH_FUNCTIONS


@functools.cache
def register() -> ModuleType:
    """Return torchax, with an environment that knows bitport's ops and QTensors."""
    torchax = import_torchax()
    env, registry = torchax.default_env(), torchax.ops.ops_registry
    ops = {OPS[name].overload: function for name, function in FUNCTIONS.items()}
    for op, function in {**ops, **LOWERINGS}.items():
        env._ops[op] = registry.all_aten_ops[op] = registry.Operator(
            op, function, is_jax_function=True, is_user_defined=True, needs_env=False, is_view_op=False
        )
    env.dispatch = _of_either(env, env.dispatch)
    return torchax


def _of_either(env: Any, known: Callable[..., Any]) -> Callable[..., Any]:
    """Return a dispatch function that handles calls with a QTensor of jax tensors among the arguments, and passes
    others to ``known``, the environment's own. The environment is not active during dispatch, and is entered again for
    the parts."""
    of_functions = {**TORCH_FUNCTIONS, Tensor.__getitem__: cut}
    arrays = (tensor_module().Tensor, tensor_module().View)

    def dispatch(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        kwargs = kwargs or {}
        weights = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, QTensor)]
        if not any(isinstance(weight.qdata, arrays) for weight in weights):
            return known(func, types, args, kwargs)
        within_one = not torch._C._is_torch_function_enabled()  # which calls torch's own
        if func in of_functions and not within_one:
            with env:
                return of_functions[func](*args, **kwargs)
        if func in ATEN:
            with env:
                return ATEN[func](func, *args, **kwargs)
        return func(*args, **kwargs)

    return dispatch


def tensor_module() -> Any:
    import torchax.tensor

    return torchax.tensor


def wrap(array: Array) -> Tensor:
    """Return the array as a torchax tensor, without a copy."""
    return tensor_module().Tensor(array, register().default_env())
