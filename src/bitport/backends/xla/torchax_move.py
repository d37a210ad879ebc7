"""Move tensors and models between torch's CPU and torchax's device, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from bitport.backends.xla.move import as_bytes, to_array, to_tensor
from bitport.backends.xla.torchax_register import register, tensor_module, wrap
from bitport.numerics import Quantized
from bitport.numerics.format import SCALE_DTYPES
from bitport.numerics.packing import from_bytes
from bitport.tensor import QTensor


def _moved(tensor: Tensor) -> Tensor:
    """Return ``tensor`` on the jax device; a QTensor in its layout there, with 8-bit floats as bytes."""
    if isinstance(tensor, tensor_module().Tensor):
        return tensor
    if not isinstance(tensor, QTensor):
        return wrap(to_array(tensor))
    if tensor.qdata.device.type == "jax":
        return tensor
    plain = tensor.to_layout("plain")
    plain = plain.replace(as_bytes(plain.parts)).map_parts(lambda part: wrap(to_array(part)))
    with register().default_env():
        return plain.to_device_layout()


def _moved_back(tensor: Tensor) -> Tensor:
    """Return ``tensor`` on the CPU; bytes of a QTensor become 8-bit floats again, according to its scheme."""
    if not isinstance(tensor, QTensor):
        return to_tensor(tensor.jax()) if isinstance(tensor, tensor_module().Tensor) else tensor
    if tensor.qdata.device.type != "jax":
        return tensor
    with register().default_env():
        plain = tensor.to_layout("plain")
    plain = plain.map_parts(lambda part: to_tensor(part.jax()))  # type: ignore[attr-defined]
    fmt = plain.scheme.weight
    data, scale = from_bytes(plain.qdata, fmt.number.storage), from_bytes(plain.scale, SCALE_DTYPES[fmt.scale])
    parts = Quantized(data, scale, plain.zero, plain.scale2 if fmt.global_scale else None)
    return plain.replace(parts).to_device_layout()


def to_jax(model: nn.Module) -> nn.Module:
    """Turn every parameter and buffer into an array, in place; tied ones stay tied."""
    register()
    return _each(model, _moved)


def to_cpu(model: nn.Module) -> nn.Module:
    """Undo :func:`to_jax`, in place and bit for bit."""
    register()
    return _each(model, _moved_back)


def _each(model: nn.Module, move: Callable[[Tensor], Tensor]) -> nn.Module:
    moved: dict[int, Any] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                if id(param) not in moved:
                    moved[id(param)] = _parameter(move(param))
                module._parameters[name] = moved[id(param)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = moved.setdefault(id(buffer), move(buffer))
    return model


def _parameter(tensor: Tensor) -> Tensor:
    """Make a parameter. For a QTensor nn.Parameter would detach its parts, which needs torchax's environment."""
    if isinstance(tensor, QTensor):
        tensor._is_param = True
        return tensor
    return nn.Parameter(tensor, requires_grad=False)
