"""Exact conversions of a QTensor to another format, for operations that its own format does not allow."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from bitport.numerics import Quantized, block_scale
from bitport.numerics.codec import readable
from bitport.numerics.packing import as_bytes
from bitport.tensor.parts import matrix_of
from bitport.tensor.qtensor import QTensor


def with_row_scales(q: QTensor) -> QTensor:
    """Repeat scales shared by several rows, so that each row has its own. The result has the plain layout."""
    q = compilable(q).to_layout("plain")
    n, fmt = q.matrix.n, q.scheme.weight
    each = torch.arange(n, device=q.qdata.device) // q.matrix.block_n
    zero = None if q.zero is None else q.zero[..., each, :]
    parts = q.parts._replace(scale=as_bytes(q.scale)[..., each, :].view(q.scale.dtype), zero=zero)
    return _in_format(q, parts, block=(1, fmt.block[1]))


def without_global(q: QTensor) -> QTensor:
    """Fold a global scale into the block scales: their float32 product, which is what dequantization uses anyway."""
    if q.scale2 is None:
        return q
    parts = q.parts._replace(scale=block_scale(q.scale, q.scale2), scale2=None)
    return _in_format(q, parts, scale="float32", global_scale=False)


def compilable(q: QTensor) -> QTensor:
    """While a program is compiled, give a weight in a layout scales that inductor can generate loops over."""
    parts = readable(q.parts) if torch.compiler.is_compiling() and q.bits_layout != "plain" else q.parts
    if parts.scale.dtype == q.scale.dtype:
        return q
    return _in_format(q, parts, scale="float32", scale_rule="floor")


def _in_format(q: QTensor, parts: Quantized, **changes: Any) -> QTensor:
    fmt = dataclasses.replace(q.scheme.weight, **changes)
    scheme = dataclasses.replace(q.scheme, weight=fmt)
    return q.replace(parts, scheme=scheme, matrix=matrix_of(fmt, q.matrix.n, q.matrix.k))
