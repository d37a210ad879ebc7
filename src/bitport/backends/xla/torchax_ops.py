"""torchax: torch programs on JAX. Its tensors (device "jax") live in its environment, which looks up ops in a table of
its own instead of PyTorch's dispatcher.

    torchax = torchax_ops.register()               # imports it and adds bitport's ops
    model = torchax_ops.to_jax(quantized_model)    # in place: parameters and buffers become arrays
    with torchax.default_env():
        y = model(x.to("jax"))                     # eager

    state, function = torchax_ops.as_function(model)
    y = jax.jit(function)(state, x)                # arrays in, arrays out
    state, function = torchax_ops.from_export(cpu_model, (x,))
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from jax import Array
from torch import Tensor, nn

from bitport import layouts
from bitport.backends.xla.decode import native
from bitport.backends.xla.k_major import NAME
from bitport.backends.xla.move import as_bytes, prefers_native, to_array
from bitport.backends.xla.torchax_move import to_cpu, to_jax
from bitport.backends.xla.torchax_register import register, wrap
from bitport.tensor import QTensor

__all__ = ["as_function", "from_export", "register", "to_cpu", "to_jax", "wrap"]


def as_function(model: nn.Module) -> tuple[dict[str, Any], Callable[..., Any]]:
    """Return (state, function) such that function(state, *arrays) computes the model, to be compiled, sharded or
    exported by JAX. The model itself moves to the jax device. The state of a QTensor is the dict of its parts."""
    to_jax(model)
    torchax = register()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    state = {name: _arrays(tensor) for name, tensor in tensors.items()}

    def function(state: dict[str, Any], *args: Any) -> Any:
        given = {name: _like(tensors[name], arrays) for name, arrays in state.items()}
        with torchax.default_env():
            result = torch.func.functional_call(model, given, torchax.interop.torch_view(args))
        return torchax.interop.jax_view(result)

    return state, function


def _arrays(tensor: Any) -> Any:
    if not isinstance(tensor, QTensor):
        return tensor.jax()
    arrays = {name: getattr(tensor, name).jax() for name in tensor.__tensor_flatten__()[0]}
    if tensor.bits_layout == NAME and tensor.matrix.dtype == "int4" and prefers_native():
        arrays["qdata"] = native(arrays["qdata"])
    return arrays


def _like(tensor: Tensor, arrays: Any) -> Tensor:
    """Return a tensor like ``tensor`` with other arrays."""
    if not isinstance(tensor, QTensor):
        return wrap(arrays)
    context = tensor.__tensor_flatten__()[1]
    inner = {name: wrap(array) for name, array in arrays.items()}
    with torch._C.DisableTorchFunctionSubclass():
        return QTensor.__tensor_unflatten__(inner, context, tuple(tensor.shape), None)


def from_export(model: nn.Module, args: tuple[Any, ...], **options: Any) -> tuple[list[Array], Callable[..., Any]]:
    """Export a model on the CPU by torch.export (which gets ``options``); return (state, function) such that
    function(state, (arrays,)) gives a list of results. Weights are exported in the layouts of a jax device."""
    register()
    from torchax.export import exported_program_to_jax

    with _in_layouts_of(model, torch.device("jax")):
        program = torch.export.export(model, args, **options)
    _, tensors, function = exported_program_to_jax(program, export_raw=True)
    return [to_array(tensor) for tensor in tensors], function


@contextlib.contextmanager
def _in_layouts_of(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Within this context, the model's weights have the layouts that ``device`` prefers, without being moved there."""
    before: list[tuple[nn.Module, str, Any]] = [
        (module, name, param)
        for module in model.modules()
        for name, param in module._parameters.items()
        if isinstance(param, QTensor)
    ]
    try:
        for module, name, weight in before:
            plain = weight.to_layout("plain")
            plain = plain.replace(as_bytes(plain.parts))
            there = plain.to_layout(layouts.preferred(device, plain.matrix, plain.parts))
            module._parameters[name] = nn.Parameter(there, requires_grad=False)
        yield
    finally:
        for module, name, weight in before:
            module._parameters[name] = weight
