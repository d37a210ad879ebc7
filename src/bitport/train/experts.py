"""Grouped product of experts in training: F.grouped_mm(x [T, K], W^T [E, K, N], offs), rows of x sorted by expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from bitport.errors import ArgumentError
from bitport.ops.grouped import masked, spans
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
        g, kept = grad.contiguous(), ctx.kept
        if kept.rounding.gradients is None:
            grad_x = _grad_of_input(g, weight, offs) if wants_x else None
            grad_w = _grad_of_weight(g, x, act_scale, offs, kept) if wants_w else None
        else:
            each = {expert: rows for expert, rows in spans(offs, len(g)) if rows.start < rows.stop}
            grad_x = _rounded_grad_of_input(g, x, kept.rows(floats), weight, each, kept) if wants_x else None
            grad_w = _rounded_grad_of_weight(g, x, act_scale, weight, each, kept) if wants_w else None
        return *before_pre_scale(grad_x, grad_w, pre_scale, perm, kept), None


def _grad_of_input(g: Tensor, weight: Weight, offs: Tensor) -> Tensor:
    nobodys = torch.arange(g.shape[0], device=g.device)[:, None] >= offs[-1]
    return _product(g, run("dequantize", *weight, g.dtype), offs).masked_fill(nobodys, 0)


def _grad_of_weight(g: Tensor, x: Tensor, act_scale: Tensor | None, offs: Tensor, kept: Kept) -> Tensor:
    seen = rounded_input(x, kept.rounding.scheme.act, act_scale)
    grad = _product(g.t(), seen.contiguous(), offs).to(kept.dtype)
    return grad.mT if kept.rounding.transposed else grad


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


def _rounded_grad_of_input(
    g: Tensor, x: Tensor, rows: Tensor | None, weight: Weight, each: Mapping[int, slice], kept: Kept
) -> Tensor:
    grad, plain = torch.zeros_like(x), weight.plain()
    for expert, at in each.items():
        own = Weight._make((*(None if part is None else part[expert] for part in plain), *weight.matrix, "plain"))
        grad[at] = grad_of_input(g[at], None if rows is None else rows[expert], own, kept)
    return grad


def _rounded_grad_of_weight(
    g: Tensor, x: Tensor, act_scale: Tensor | None, weight: Weight, each: Mapping[int, slice], kept: Kept
) -> Tensor:
    shape = (weight.k, weight.n) if kept.rounding.transposed else (weight.n, weight.k)
    grad = torch.zeros(*weight.batch, *shape, dtype=kept.dtype, device=x.device)
    for expert, at in each.items():
        grad[expert] = grad_of_weight(g[at], x[at], act_scale, kept)
    return grad


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
