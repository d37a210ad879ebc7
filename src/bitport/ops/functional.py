"""What torch's own functions do with a QTensor: F.linear goes straight to one bitport op, before any dispatch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bitport.errors import ArgumentError
from bitport.ops import select
from bitport.ops.table import OPS
from bitport.ops.weight import Weight
from bitport.tensor import ATEN, FUNCTIONS, QTensor

aten = torch.ops.aten


def operand(q: QTensor) -> Weight:
    return Weight(q.qdata, q.scale, q.zero, q.scale2, *q.matrix, q.bits_layout)


def run(op: str, *args: Any) -> Any:
    """Call an op: through torch where it may be traced or differentiated, past autograd's Python otherwise (4 us)."""
    if select.FORCED and not torch.compiler.is_compiling():
        return select.call(op, *args, kernel=select.FORCED.get(op, select.FORCED.get("*")))
    return _overload(op)(*args)


@functools.cache
def _overload(op: str) -> Any:
    return OPS[op].overload


def linear(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Tensor:
    """F.linear with a quantized weight: the input is prepared as the weight asks, then one op."""
    if isinstance(x, QTensor) or not isinstance(weight, QTensor):
        raise ArgumentError("F.linear takes a quantized tensor as its weight only; dequantize() the input")
    if weight.transposed:
        raise ArgumentError("this QTensor is a transposed view [K, N]; F.linear wants [N, K]: pass weight.t()")
    return product(x, weight, bias)


def product(x: Tensor, q: QTensor, bias: Tensor | None = None) -> Tensor:
    """x [.., K] times the matrix [N, K] behind q."""
    x = prepare(x, q)
    if act := q.scheme.act:
        if q.scheme.static and q.act_scale is None:
            raise ArgumentError(f"{q.scheme} has a static input scale, but none was calibrated: quantize_(.., calibrate=batches)")
        return run("dyn_linear", x, *operand(q), act, q.act_scale, bias)
    return run("linear", x, *operand(q), bias)


def prepare(x: Tensor, q: QTensor) -> Tensor:
    """Autocast, then the pre-scale (AWQ, SmoothQuant), then the order of columns (act-order)."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if q.pre_scale is not None:
        x = x * q.pre_scale.to(x.dtype)
    if q.perm is not None:
        x = x.index_select(-1, q.perm)
    return x


def embedding(
    ids: Tensor,
    weight: QTensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if max_norm is not None:
        raise ArgumentError("max_norm rewrites the table on every lookup; a quantized one cannot be rewritten")
    return run("embedding", ids, *operand(weight), _dtype(weight))


def _dtype(q: QTensor) -> torch.dtype:
    with torch._C.DisableTorchFunctionSubclass():
        return q.dtype


def _convolution(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A convolution with a quantized weight: dequantized to the input's dtype, then torch's own."""

    def conv(x: Tensor, weight: QTensor, *args: Any, **kwargs: Any) -> Tensor:
        return fn(x, weight.dequantize(x.dtype), *args, **kwargs)

    return conv


def matmul(x: Tensor, q: Tensor) -> Tensor:
    """x [.., K] @ q where q is the transposed view [K, N] of a weight, or [E, K, N] of experts."""
    if isinstance(x, QTensor) or not isinstance(q, QTensor):
        raise ArgumentError("a quantized tensor can be the right factor of a product only; dequantize() it")
    if q.transposed and not q.batched:
        return product(x, q)
    return x @ q.dequantize(x.dtype)


def addmm(bias: Tensor, x: Tensor, q: QTensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    y = matmul(x, q)
    return y * alpha + bias * beta if (alpha, beta) != (1, 1) else y + bias


def grouped_mm(x: Tensor, q: QTensor, *, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None) -> Tensor:
    """F.grouped_mm(x [T, K], q [E, K, N], offs): the transposed view of expert weights [E, N, K]."""
    if offs is None or bias is not None or not isinstance(q, QTensor) or isinstance(x, QTensor):
        raise ArgumentError("a quantized grouped product takes (x, experts, offs=...), experts quantized and no bias")
    if not q.transposed:
        dense = q.dequantize(x.dtype)
        return F.grouped_mm(x, dense, offs=offs, out_dtype=out_dtype)
    x = prepare(x, q)
    if q.scheme.act:
        y = run("dyn_grouped_linear", x, offs, *operand(q), q.scheme.act)
    else:
        y = run("grouped_linear", x, offs, *operand(q))
    return y if out_dtype is None else y.to(out_dtype)


FUNCTIONS.update(
    {
        F.linear: linear,
        F.embedding: embedding,
        F.conv1d: _convolution(F.conv1d),
        F.conv2d: _convolution(F.conv2d),
        torch.conv1d: _convolution(F.conv1d),
        torch.conv2d: _convolution(F.conv2d),
        torch.matmul: matmul,
        torch.mm: matmul,
        torch.bmm: matmul,
        Tensor.matmul: matmul,
        Tensor.__matmul__: matmul,
        Tensor.mm: matmul,
        Tensor.bmm: matmul,
        torch.addmm: addmm,
        F.grouped_mm: grouped_mm,
        torch._grouped_mm: grouped_mm,
    }
)


def _aten(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda func, *args, **kwargs: fn(*args, **kwargs)


ATEN.update(
    {
        aten.mm.default: _aten(matmul),
        aten.bmm.default: _aten(matmul),
        aten.addmm.default: _aten(addmm),
        aten.linear.default: _aten(linear),
        aten.embedding.default: _aten(lambda weight, ids, *rest: embedding(ids, weight)),
        aten.convolution.default: lambda func, x, weight, *rest: func(x, weight.dequantize(x.dtype), *rest),
    }
)
