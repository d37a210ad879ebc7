"""Ops that models with quantized weights need and that torchax 0.0.13 lacks or gets wrong."""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array
from torch import Tensor

from bitport.backends.xla.decode import jax_dtype
from bitport.backends.xla.products import by_expert
from bitport.errors import ArgumentError
from bitport.ops.functional import getitem
from bitport.tensor import QTensor

aten = torch.ops.aten
PLACES = (int, slice, EllipsisType)


def view_dtype(x: Array, dtype: torch.dtype) -> Array:
    """x.view(dtype): reinterpret the bytes along the last axis. torchax mistakes the dtype for a shape."""
    to = jax_dtype(dtype)
    if to.itemsize > x.dtype.itemsize:
        ratio = to.itemsize // x.dtype.itemsize
        return jax.lax.bitcast_convert_type(x.reshape(*x.shape[:-1], x.shape[-1] // ratio, ratio), to)
    made = jax.lax.bitcast_convert_type(x, to)
    return made if made.ndim == x.ndim else made.reshape(*x.shape[:-1], made.shape[-2] * made.shape[-1])


def grouped_mm(
    x: Array, w: Array, offs: Array | None = None, bias: Array | None = None, out_dtype: torch.dtype | None = None
) -> Array:
    """F.grouped_mm of floats: each row of x [T, K] times its expert's matrix of [E, K, N]."""
    if offs is None or bias is not None or (x.ndim, w.ndim) != (2, 3):
        raise ArgumentError(
            f"on torchax's device F.grouped_mm takes x [T, K], w [E, K, N] and offs, no bias; not {[*x.shape]}, "
            f"{[*w.shape]}, {'no offs' if offs is None else 'offs'}{'' if bias is None else ' and a bias'}"
        )
    return by_expert(x, offs, jnp.swapaxes(w, -1, -2)).astype(jax_dtype(out_dtype or x.dtype))


def convolution(
    x: Array,
    w: Array,
    bias: Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Array:
    """Also transposed in groups, whose weight torchax reshapes where it has to permute it. A transposed convolution is
    one of x with ``stride - 1`` zeros between its numbers, by the kernel from its end to its start."""
    rank = w.ndim - 2
    strides, pads, steps, more = ([*v] * (rank // len(v)) for v in (stride, padding, dilation, output_padding))
    apart, between = [1] * rank, strides
    if transposed:
        w = w.reshape(groups, -1, *w.shape[1:]).swapaxes(1, 2)  # [groups, Cout / groups, Cin / groups, ...]
        w = jnp.flip(w.reshape(-1, *w.shape[2:]), range(2, 2 + rank))
        reach = [step * (size - 1) - pad for step, size, pad in zip(steps, w.shape[2:], pads, strict=True)]
        edges = [(before, before + rest) for before, rest in zip(reach, more, strict=True)]
        apart, between = strides, [1] * rank
    else:
        edges = [(pad, pad) for pad in pads]
    y = jax.lax.conv_general_dilated(x, w, between, edges, apart, steps, feature_group_count=groups)
    return y if bias is None else y + bias.reshape(-1, *[1] * rank)


LOWERINGS = {
    aten.view.dtype: view_dtype,
    aten.convolution.default: convolution,
    aten._grouped_mm.default: grouped_mm,
    # torchax makes these logical. They occur under torch.inference_mode(); elsewhere they are bitwise_and and so on.
    aten.__and__: jnp.bitwise_and,
    aten.__or__: jnp.bitwise_or,
    aten.__xor__: jnp.bitwise_xor,
}


def cut(q: QTensor, index: Any) -> Any:
    """Return ``q[index]``. Torch's own indexing needs a device guard, which torchax does not have, before it calls
    slice, so the slices are taken here."""
    if isinstance(index, Tensor):
        return getitem(q, index) if q.dim() == 2 else aten.index.Tensor(q, [index])
    entries = [*index] if isinstance(index, tuple) else [index]
    if not all(entry is None or (isinstance(entry, PLACES) and not isinstance(entry, bool)) for entry in entries):
        raise ArgumentError(
            f"on torchax's device a QTensor is indexed by one tensor, or by ints, slices, None and ..., not {index!r}"
        )
    if ... in entries:
        at, named = entries.index(...), sum(entry is not None for entry in entries) - 1
        entries[at : at + 1] = [slice(None)] * (q.dim() - named)
    dim = 0
    for entry in entries:
        if isinstance(entry, slice):
            q = aten.slice.Tensor(q, dim, entry.start, entry.stop, 1 if entry.step is None else entry.step)
        else:
            q = aten.unsqueeze.default(q, dim) if entry is None else aten.select.int(q, dim, entry)
        dim += not isinstance(entry, int)
    return q
