"""PyTorch's own low-bit ops as kernels, for the devices that have them. Each module holds one op: what it is called
with (``run``) and what it refuses everywhere; a device's folder adds its own limits and registers the two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bitport.numerics import Quantized
from bitport.ops.convert import from_list
from bitport.ops.select import CHOOSERS


def rows(x: Tensor) -> Tensor:
    """x [..., K] as a contiguous [M, K] that starts at a multiple of 16 bytes: kernels that read words or vectors there
    do not look at where it starts, or refuse it."""
    flat = x.reshape(x.numel() // max(1, x.shape[-1]), x.shape[-1]).contiguous()
    return flat.clone() if flat.storage_offset() * flat.itemsize % 16 else flat


def finish(y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """[M, N] in the leading shape and the dtype of x, the bias added."""
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.to(x.dtype).reshape(*x.shape[:-1], y.shape[-1])


def rounded(x: Tensor, act: str, act_scale: Tensor | None = None) -> Quantized:
    """x as [M, K] in an activation format, by the device's kernel for that."""
    return from_list(CHOOSERS["quantize_input"](x, act, act_scale))


LEAST_ROWS: dict[str, Callable[[str, torch.device], int | None]] = {}
"""Device type -> (kernel, device) -> from how many rows on it is the best there, None for never. Who brings other
kernels to a device knows; where nobody does, every number of rows is taken."""


def from_rows(kernel: str, refuses: Callable[..., str | None], experts: bool = False) -> Callable[..., str | None]:
    """``refuses``, and calls with fewer rows than ``kernel`` is the best for; of ``experts``, on average for each."""

    def supports(x: Tensor, *rest: Any) -> str | None:
        return refuses(x, *rest) or too_few(kernel, x, rest[0].shape[0] if experts else 1)

    return supports


def too_few(kernel: str, x: Tensor, experts: int) -> str | None:
    known = LEAST_ROWS.get(x.device.type)
    least = known(kernel, x.device) if known else 1
    if least is None:
        return "others are faster here for any number of rows"
    have, least = x.numel() // max(1, x.shape[-1]), least * experts
    return f"it is chosen from {least} rows on here; x has {have}" if have < least else None
