"""Grouped product of experts in training: F.grouped_mm(x [T, K], W^T [E, K, N], offs), rows of x sorted by expert."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from bitport.errors import ArgumentError
from bitport.ops.grouped import masked
from bitport.ops.matmul import grouped
from bitport.ops.product import autocasted, run
from bitport.ops.weight import Weight
from bitport.train.product import Kept, before_pre_scale, grad_of_input, grad_of_weight, keep, refuse_transforms
from bitport.train.rounded import operand_of, pre_scaled, rounded_input
from bitport.train.tensor import TrainedTensor


class GroupedProduct(torch.autograd.Function):
    """Like :class:`Product` for each expert. Rounded gradients are computed expert by expert, so that no scale spans
    the rows of two; this synchronizes with the device to read ``offs``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: TrainedTensor, offs: Tensor) -> Tensor:
        scheme = w.scheme
        weight, x = operand_of(w), pre_scaled(x, w)
        keep(ctx, x, w, weight, offs)
        return grouped(x, offs, weight, scheme.act, w.act_scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, offs, floats, act_scale, pre_scale, perm, *parts = ctx.saved_tensors
        weight = Weight._make((*parts, *ctx.kept.described))
        wants_x, wants_w, _ = ctx.needs_input_grad
        backward = _straight if ctx.kept.rounding.gradients is None else _each
        seen = x, act_scale, ctx.kept.rows(floats), weight, offs, ctx.kept
        grads = backward(grad.contiguous(), *seen, (wants_x, wants_w))
        return *before_pre_scale(*grads, pre_scale, perm, ctx.kept), None


def _straight(
    g: Tensor,
    x: Tensor,
    act_scale: Tensor | None,
    rows: None,
    weight: Weight,
    offs: Tensor,
    kept: Kept,
    wants: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    grad_x = grad_w = None
    if wants[0]:
        nobodys = torch.arange(x.shape[0], device=x.device)[:, None] >= offs[-1]
        grad_x = _product(g, run("dequantize", *weight, g.dtype), offs).masked_fill(nobodys, 0)
    if wants[1]:
        seen = rounded_input(x, kept.rounding.scheme.act, act_scale)
        grad_w = _product(g.t(), seen.contiguous(), offs).to(kept.dtype)
        grad_w = grad_w.mT if kept.rounding.transposed else grad_w
    return grad_x, grad_w


def _product(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """F.grouped_mm, which compilers only trace in bfloat16: in other dtypes every expert processes every row, and a
    mask selects. PyTorch 2.11 does not report that it traces a backward pass, except by the type of its tensors."""
    traced = torch.compiler.is_compiling() or isinstance(a, FunctionalTensor)
    if a.dtype == torch.bfloat16 or not traced:
        return F.grouped_mm(a, b, offs=offs)
    if b.dim() == 3:
        return masked(a, offs, b.mT)
    rows, experts = (torch.arange(count, device=a.device) for count in (b.shape[0], offs.shape[0]))
    expert = torch.searchsorted(offs, rows, right=True)
    others = expert != experts[:, None]
    return a.masked_fill(others[:, None], 0) @ b.masked_fill((expert == len(experts))[:, None], 0)


def _each(
    g: Tensor,
    x: Tensor,
    act_scale: Tensor | None,
    rows: Tensor | None,
    weight: Weight,
    offs: Tensor,
    kept: Kept,
    wants: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    shape = (*weight.batch, weight.k, weight.n) if kept.rounding.transposed else (*weight.batch, weight.n, weight.k)
    grad_x = torch.zeros_like(x) if wants[0] else None
    grad_w = torch.zeros(shape, dtype=kept.dtype, device=x.device) if wants[1] else None
    plain, start = weight.plain(), 0
    for expert, end in enumerate(offs.tolist()):
        if start < end and grad_x is not None:
            parts = (None if part is None else part[expert] for part in plain)
            own = Weight._make((*parts, *weight.matrix, "plain"))
            grad_x[start:end] = grad_of_input(g[start:end], None if rows is None else rows[expert], own, kept)
        if start < end and grad_w is not None:
            grad_w[expert] = grad_of_weight(g[start:end], x[start:end], act_scale, kept)
        start = end
    return grad_x, grad_w


def grouped_mm(
    mat_a: Tensor, mat_b: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> Tensor:
    if offs is None or bias is not None or isinstance(mat_a, TrainedTensor) or not isinstance(mat_b, TrainedTensor):
        raise ArgumentError(
            "a grouped product with experts in training takes (x, experts, offs=...), experts in training and no bias"
        )
    if not mat_b.rounding.transposed:
        raise ArgumentError(f"{mat_b!r} has its inputs last; F.grouped_mm wants [experts, K, N]: pass weight.mT")
    refuse_transforms()
    y = GroupedProduct.apply(autocasted(mat_a), mat_b, offs)
    return y if out_dtype is None else y.to(out_dtype)
