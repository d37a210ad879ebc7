"""PyTorch's own low-bit ops as kernels, for the devices that have them. Each module holds one op: what it is called
with (``run``) and what it refuses everywhere; a device's folder adds its own limits and registers the two."""

from __future__ import annotations

from torch import Tensor

from bitport.numerics import Quantized
from bitport.ops.convert import from_list
from bitport.ops.select import CHOOSERS


def rows(x: Tensor) -> Tensor:
    """x [..., K] as a contiguous [M, K]."""
    return x.reshape(x.numel() // max(1, x.shape[-1]), x.shape[-1]).contiguous()


def finish(y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """[M, N] in the leading shape and the dtype of x, the bias added."""
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.to(x.dtype).reshape(*x.shape[:-1], y.shape[-1])


def rounded(x: Tensor, act: str, act_scale: Tensor | None = None) -> Quantized:
    """x as [M, K] in an activation format, by the device's kernel for that."""
    return from_list(CHOOSERS["quantize_input"](x, act, act_scale))
