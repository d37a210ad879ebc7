"""PyTorch's own low-bit ops as kernels, for the devices that have them. Each module wraps one op: ``run`` calls it, and
``refuses`` checks the limits that it has everywhere. A device's folder adds its own limits and registers the two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from bitport.numerics import Quantized
from bitport.ops.convert import from_list
from bitport.ops.select import CHOOSERS


def count(x: Tensor) -> int:
    """Return the number of rows of x [..., K]; 0 if they have no columns."""
    return x.numel() // max(1, x.shape[-1])


def rows(x: Tensor) -> Tensor:
    """Return x [..., K] as :func:`aligned` [M, K]."""
    return aligned(x.reshape(count(x), x.shape[-1]))


def empty(x: Tensor, n: int) -> str | None:
    """Return why a product of x by N rows of a weight has no numbers, or none to add up; None if it has some."""
    if x.numel() == 0:
        return "x has no rows" if x.shape[-1] else "x has no columns"
    return None if n else "the weight has no rows"


def aligned(part: Tensor) -> Tensor:
    """Return ``part`` contiguous and aligned to 16 bytes: kernels with vector loads either do not check alignment or
    refuse unaligned tensors."""
    part = part.contiguous()
    return part.clone() if beginning(part) % 16 else part


def beginning(part: Tensor) -> int | torch.SymInt:
    """Return the address of the first number, counted from that of the storage where a fake tensor has no memory. The
    storage itself need not be aligned: it may be a file's or another library's."""
    return part.storage_offset() * part.itemsize if isinstance(part, FakeTensor) else part.data_ptr()


def finish(y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """Add the bias to y [M, N]; return it in the leading shape and dtype of x."""
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.to(x.dtype).reshape(*x.shape[:-1], y.shape[-1])


def rounded(x: Tensor, act: str, act_scale: Tensor | None = None) -> Quantized:
    """Quantize x as [M, K] to the activation format ``act`` with the device's own kernel."""
    return from_list(CHOOSERS["quantize_input"](x, act, act_scale))


LEAST_ROWS: dict[str, Callable[[str, torch.device], int | None]] = {}
"""Device type -> function of (kernel, device): the least number of rows for which the kernel is the fastest there, None
for never. Filled in by whoever brings competing kernels to a device; without an entry any number of rows is
accepted."""


def from_rows(kernel: str, refuses: Callable[..., str | None], experts: bool = False) -> Callable[..., str | None]:
    """Extend ``refuses`` to calls with fewer rows than ``kernel`` is the fastest for; ``experts``: on average per
    expert."""

    def supports(x: Tensor, *rest: Any) -> str | None:
        return refuses(x, *rest) or too_few(kernel, x, rest[0].shape[0] if experts else 1)

    return supports


def too_few(kernel: str, x: Tensor, experts: int) -> str | None:
    known = LEAST_ROWS.get(x.device.type)
    least = known(kernel, x.device) if known else 1
    if least is None:
        return "others are faster here for any number of rows"
    have, least = count(x), least * experts
    return f"it is chosen from {least} rows on here; x has {have}" if have < least else None
