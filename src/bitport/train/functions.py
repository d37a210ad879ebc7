"""Overrides of torch functions for weights in training: those that amount to a linear layer use Product.

Everything else reaches bitport.train.aten through autograd, which is correct if only the weight is rounded. This module
covers functions that also round the input, so that the gradient of the weight uses the rounded input, and products
without a rounded form, which must not fall back to the float values when no gradient is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from bitport.ops.bags import embedding_bag
from bitport.ops.functional import COMPOSED, TRACED_GROUPED_MM, attention_by
from bitport.ops.matmul import added, in_place, into_given
from bitport.tensor import QTensor, matrix_of
from bitport.tensor.forms import with_row_scales, without_global
from bitport.train.experts import grouped_mm
from bitport.train.fixed import fixed_of
from bitport.train.product import linear
from bitport.train.rounded import parts_of
from bitport.train.tensor import ATEN, FUNCTIONS, TrainedTensor, outside_of_products

aten = torch.ops.aten


def _matmul(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def product(input: Tensor, other: Tensor) -> Tensor:
        if isinstance(input, TrainedTensor) and not isinstance(other, TrainedTensor):
            return matmul(other, input.mT) if other.dim() == 1 else product(other.mT, input.mT).mT
        if isinstance(other, TrainedTensor) and not isinstance(input, TrainedTensor):
            if other.dim() == 2:
                return linear(input, other.mT) if other.rounding.transposed else _along_n(input, other)
            if input.dim() == 1:
                return product(input[None], other).squeeze(-2)
            if input.dim() < other.dim():  # torch would fold the batch into one matrix
                return product(input.expand(*other.shape[:-2], *input.shape[-2:]), other)
            one_by_one = other.rounding.transposed and (other.scheme.act or other.rounding.gradients)
            if input.dim() == other.dim() == 3 and one_by_one:
                pairs = zip(input.unbind(), other.mT.unbind(), strict=True)
                return torch.stack([linear(x, w) for x, w in pairs])
        with torch._C.DisableTorchFunctionSubclass():
            return function(input, other)

    return product


def _along_n(g: Tensor, w: TrainedTensor) -> Tensor:
    """g [.., N] times W [N, K]."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.mm(g.reshape(-1, g.shape[-1]), w).reshape(*g.shape[:-1], w.shape[1])


matmul = _matmul(torch.matmul)


def _mm(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    product = _matmul(function)
    return lambda input, mat2: product(input, mat2)


def _mv(input: Tensor, vec: Tensor) -> Tensor:
    return matmul(input, vec)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    turned = isinstance(weight, TrainedTensor) and weight.rounding.transposed and weight.dim() == 2
    if turned and not isinstance(input, TrainedTensor):
        y = matmul(input, weight.mT)  # sums over N: a tied decoder
        return y if bias is None else y + bias
    return linear(input, weight, bias)


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return added(matmul(mat1, mat2), input, beta, alpha)


def _addmm_(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if isinstance(input, TrainedTensor):
        raise outside_of_products("Tensor.addmm_")
    return in_place(_addmm)(input, *args, **kwargs)


class _RowsApart(torch.autograd.Function):
    """The weight rounded as in this step, with one scale per row."""

    @staticmethod
    def forward(ctx: Any, w: TrainedTensor) -> TrainedTensor:
        if w.quantized is not None:
            apart = with_row_scales(w.quantized)
            return w.with_value(apart, scheme=apart.scheme)
        fmt, rows, shape = w.scheme.weight, w.rows(), (w.shape[0], w.shape[1])
        parts = parts_of(rows, fmt, w.fixed)
        q = QTensor(parts, w.scheme, shape=shape, dtype=w.dtype, matrix=matrix_of(fmt, *shape), pre_scale=w.pre_scale)
        apart = without_global(with_row_scales(q))
        return w.with_value(w.value.view_as(w.value), fixed_of(apart), scheme=apart.scheme)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _rows_apart(weight: Any, width: int) -> Any:
    if not isinstance(weight, TrainedTensor):
        return weight
    fmt = weight.scheme.weight
    block = 0 if fmt.global_scale else fmt.block[0]
    return weight if block and width % block == 0 else _RowsApart.apply(weight)


def _refused(function: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise outside_of_products(function.__name__)

    return refuse


def _refused_aten(func: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise outside_of_products(func)


FUNCTIONS.update(
    {F.linear: _linear, F.embedding_bag: embedding_bag, F.grouped_mm: grouped_mm, torch._grouped_mm: grouped_mm}
)
FUNCTIONS[F.multi_head_attention_forward] = attention_by(_rows_apart)
FUNCTIONS.update(COMPOSED)
FUNCTIONS[TRACED_GROUPED_MM] = grouped_mm
FUNCTIONS.update(
    {function: into_given(_mm(function)) for function in (torch.mm, torch.bmm)}
    | {function: _mm(function) for function in (Tensor.mm, Tensor.bmm)}
    | {torch.matmul: into_given(matmul), Tensor.matmul: matmul, Tensor.__matmul__: matmul}
    | {torch.mv: into_given(_mv), Tensor.mv: _mv}
    | {torch.addmm: into_given(_addmm), Tensor.addmm: _addmm, Tensor.addmm_: _addmm_}
)
FUNCTIONS.update(
    {
        function: _refused(function)
        for function in (
            *(torch.einsum, torch.addmv, Tensor.addmv, torch.linalg.vecdot, F.bilinear),
            *(Tensor.baddbmm_, torch._addmm_activation, torch.sparse.mm),
            *(Tensor.apply_, Tensor.__dlpack__),  # torch's versions access storage that a TrainedTensor lacks
        )
    }
)

# inference_mode dispatches these without decomposing them
ATEN.update(
    {
        aten.linear.default: lambda func, *args: _linear(*args),
        aten.matmul.default: lambda func, *args: _matmul(func.decompose)(*args),
    }
)

# every other form of a product, however it was called: out=, in place, with sparse or single vectors
for _packet in (
    *(aten.mm, aten.bmm, aten.mv, aten.dot, aten.vdot, aten.matmul, aten.linear, aten.linalg_vecdot, aten.conv_tbc),
    *(aten.addmm, aten.baddbmm, aten.addbmm, aten.addmv, aten._addmm_activation),
    *(aten.addmm_, aten.baddbmm_, aten.addbmm_, aten.addmv_),
    *(aten._sparse_addmm, aten.sparse_sampled_addmm, aten.sspaddmm, aten.hspmm),
):
    for _overload in _packet.overloads():
        ATEN.setdefault(getattr(_packet, _overload), _refused_aten)
