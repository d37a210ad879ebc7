"""Convert between torch tensors and JAX arrays, bit for bit; 8-bit floats travel as bytes (uint8)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array
from torch import Tensor

from bitport.backends.xla.decode import native
from bitport.backends.xla.k_major import NAME
from bitport.numerics import Quantized
from bitport.ops import Op


def to_array(tensor: Tensor) -> Array:
    """Copy a tensor to a contiguous array; 8-bit floats become uint8."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.is_floating_point() and tensor.dtype.itemsize == 1:
        tensor = tensor.view(torch.uint8)
    if tensor.dtype == torch.bfloat16:
        bits = jnp.asarray(tensor.view(torch.int16).numpy())
        return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
    return jnp.asarray(tensor.numpy())


def to_tensor(array: Array) -> Tensor:
    if array.dtype == jnp.bfloat16:
        return torch.from_numpy(np.array(array).view(np.int16)).view(torch.bfloat16)
    if array.dtype.itemsize == 1 and jnp.issubdtype(array.dtype, jnp.floating):
        return torch.from_numpy(np.array(array).view(np.uint8))
    return torch.from_numpy(np.array(array))


def as_bytes(parts: Quantized) -> Quantized:
    """Return parts that stay unambiguous as uint8: e8m0 scales have no scale2, so e4m3 scales get one."""
    if parts.scale.dtype == torch.float8_e4m3fn and parts.scale2 is None:
        one = torch.ones(*parts.scale.shape[:-2], 1, 1, device=parts.scale.device)
        return parts._replace(scale2=one)
    return parts


def prefers_native() -> bool:
    return jax.default_backend() == "tpu"


def op_arrays(op: Op, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return an op's arguments with arrays instead of tensors, those of weights in the form that the device takes."""
    given = list(args)
    for at, name in enumerate(op.arguments):
        if name.endswith("data"):  # the first of a weight's ten; also k_data and v_data
            given[at : at + 10] = weight_arrays(given[at : at + 10])
    return tuple(to_array(arg) if isinstance(arg, Tensor) else arg for arg in given)


def weight_arrays(weight: Any) -> tuple[Any, ...]:
    """Return the ten arguments of a weight with arrays instead of tensors."""
    parts = as_bytes(Quantized(*weight[:4]))
    data, *rest = (None if part is None else to_array(part) for part in parts)
    if weight[9] == NAME and weight[4] == "int4" and prefers_native():
        data = native(data)
    return (data, *rest, *weight[4:])
