"""The grouped product of experts in training: F.grouped_mm(x [T, K], W^T [E, K, N], offs), rows of x by expert."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bitport.errors import ArgumentError
from bitport.ops.functional import run
from bitport.ops.weight import Weight
from bitport.train.product import DESCRIBED, grad_of_input, grad_of_weight
from bitport.train.rounded import operand, rounded_input
from bitport.train.tensor import TrainedTensor


class GroupedProduct(torch.autograd.Function):
    """As :class:`Product` for each expert. A gradient that is rounded is taken expert by expert, so that no scale
    reaches over the rows of two; this asks the device for ``offs``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: TrainedTensor, offs: Tensor) -> Tensor:
        scheme = w.scheme
        weight = operand(w.rows(), scheme.weight, scheme.act)
        ctx.save_for_backward(x, w, offs, *weight[:4])
        ctx.described = weight[DESCRIBED]
        if scheme.act:
            return run("dyn_grouped_linear", x, offs, *weight, scheme.act)
        return run("grouped_linear", x, offs, *weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w, offs, *parts = ctx.saved_tensors
        weight, grad = Weight(*parts, *ctx.described), grad.contiguous()
        wants_x, wants_w, _ = ctx.needs_input_grad
        if w.rounding.gradients is not None:
            grads = _each(grad, x, w, weight, offs, wants_x, wants_w)
        else:
            grads = _straight(grad, x, w, weight, offs, wants_x, wants_w)
        return *grads, None


def _straight(
    g: Tensor, x: Tensor, w: TrainedTensor, weight: Weight, offs: Tensor, wants_x: bool, wants_w: bool
) -> tuple[Tensor | None, Tensor | None]:
    grad_x = grad_w = None
    nobodys = torch.arange(x.shape[0], device=x.device)[:, None] >= offs[-1]
    if wants_x:
        grad_x = F.grouped_mm(g, run("dequantize", *weight, g.dtype), offs=offs).masked_fill(nobodys, 0)
    if wants_w:
        rows = F.grouped_mm(g.t(), rounded_input(x, w.scheme.act, None).contiguous(), offs=offs)
        grad_w = (rows.mT if w.rounding.transposed else rows).to(w.dtype)
    return grad_x, grad_w


def _each(
    g: Tensor, x: Tensor, w: TrainedTensor, weight: Weight, offs: Tensor, wants_x: bool, wants_w: bool
) -> tuple[Tensor | None, Tensor | None]:
    grad_x, grad_w = torch.zeros_like(x), torch.zeros_like(w)
    start = 0
    for expert, end in enumerate(offs.tolist()):
        own = w.with_value(w.value[expert])
        parts = (None if part is None else part[expert] for part in weight.plain())
        if start < end and wants_x:
            plain = Weight._make((*parts, *weight.matrix, "plain"))
            grad_x[start:end] = grad_of_input(g[start:end], own, plain)
        if start < end and wants_w:
            grad_w[expert] = grad_of_weight(g[start:end], x[start:end], own, None)
        start = end
    return grad_x if wants_x else None, grad_w if wants_w else None


def grouped_mm(
    mat_a: Tensor, mat_b: Tensor, *, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> Tensor:
    if offs is None or bias is not None or isinstance(mat_a, TrainedTensor) or not isinstance(mat_b, TrainedTensor):
        raise ArgumentError(
            "a grouped product with experts in training takes (x, experts, offs=...), experts in training and no bias"
        )
    if not mat_b.rounding.transposed:
        raise ArgumentError(f"{mat_b!r} has its inputs last; F.grouped_mm wants [experts, K, N]: pass weight.mT")
    y = GroupedProduct.apply(mat_a, mat_b, offs)
    return y if out_dtype is None else y.to(out_dtype)
