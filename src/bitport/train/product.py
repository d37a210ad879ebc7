"""y = x W^T + bias with a W in training: forward by the kernels of the quantized model, backward according to Rounding.

    gradients None     gx = g rounded(W)       gw = g^T rounded(x)       in g's dtype
    Gradients          each product that has a scheme multiplies two rounded factors

Saved for backward are x and the codes of W, plus the floats of W, which exist anyway, if the gradient of the input
rounds them along N.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitport.errors import ArgumentError
from bitport.ops.product import autocasted, run
from bitport.ops.table import gradient_of_bias, no_view
from bitport.ops.weight import Weight
from bitport.schemes import Scheme
from bitport.tensor.qtensor import rows_of
from bitport.train.rounded import operand, operand_of, pre_scaled, rounded_input
from bitport.train.tensor import Rounding, TrainedTensor, value_of


def rounded_product(left: Tensor, right: Tensor, scheme: Scheme) -> Tensor:
    """left [M, K] right^T [K, N], both rounded along K according to ``scheme``."""
    return run("dyn_linear", left, *operand(right, scheme.weight, scheme.act), scheme.act, None, None)


class Kept(NamedTuple):
    """What the backward pass needs of a weight, apart from tensors."""

    rounding: Rounding
    dtype: torch.dtype
    described: tuple[Any, ...]
    """The fields of Weight after its four tensors."""

    def rows(self, floats: Tensor | None) -> Tensor | None:
        """[.., N, K] of the saved weight; hooks that offload saved tensors may return only its value."""
        return None if floats is None else rows_of(value_of(floats), self.rounding.kind, self.rounding.transposed)


def keep(ctx: Any, x: Tensor, w: TrainedTensor, weight: Weight, *further: Tensor) -> None:
    """Save for backward. ``x``: as returned by pre_scaled(). The weight is saved itself rather than its value, so that
    PyTorch detects changes in place."""
    gradients = w.rounding.gradients
    floats = w if gradients is not None and gradients.input is not None else None
    prepared = (w.pre_scale, None) if w.quantized is None else (w.quantized.pre_scale, w.quantized.perm)
    ctx.save_for_backward(x, *further, floats, w.act_scale, *prepared, *weight[:4])
    ctx.kept = Kept(w.rounding, w.dtype, weight[4:])


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: TrainedTensor, bias: Tensor | None) -> Tensor:
        scheme = w.scheme
        weight, x = operand_of(w), pre_scaled(x, w)
        keep(ctx, x, w, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        if not scheme.act:
            return no_view(run("linear", x, *weight, bias))
        return no_view(run("dyn_linear", x, *weight, scheme.act, w.act_scale, bias))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, floats, act_scale, pre_scale, perm, *parts = ctx.saved_tensors
        wants_x, wants_w, wants_bias = ctx.needs_input_grad
        g, seen = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        grad_x = grad_w = grad_bias = None
        if wants_x:
            weight = Weight._make((*parts, *ctx.kept.described))
            grad_x = grad_of_input(g, ctx.kept.rows(floats), weight, ctx.kept).reshape(x.shape)
        if wants_w:
            grad_w = grad_of_weight(g, seen, act_scale, ctx.kept)
        if wants_bias:
            grad_bias = gradient_of_bias(g, ctx.bias_dtype)
        return *before_pre_scale(grad_x, grad_w, pre_scale, perm, ctx.kept), grad_bias


def grad_of_input(g: Tensor, rows: Tensor | None, weight: Weight, kept: Kept) -> Tensor:
    """``rows``: the floats of ``weight``, if they must be rounded along N."""
    gradients = kept.rounding.gradients
    if gradients is None or gradients.input is None or rows is None:
        return g @ run("dequantize", *weight, g.dtype)
    return rounded_product(g, rows.to(g.dtype).mT, gradients.input)


def grad_of_weight(g: Tensor, x: Tensor, act_scale: Tensor | None, kept: Kept) -> Tensor:
    gradients, act = kept.rounding.gradients, kept.rounding.scheme.act
    if gradients is not None and gradients.weight is not None and len(g):
        grad = rounded_product(g.t().contiguous(), x.t(), gradients.weight)
    else:
        grad = g.t() @ rounded_input(x, act, act_scale)
    return (grad.t() if kept.rounding.transposed else grad).to(kept.dtype)


def before_pre_scale(
    grad_x: Tensor | None, grad_w: Tensor | None, pre_scale: Tensor | None, perm: Tensor | None, kept: Kept
) -> tuple[Tensor | None, Tensor | None]:
    """Map gradients back to the input before scaling and permutation, and to the value before division and
    permutation."""
    if perm is not None:
        order, k = perm.long(), -2 if kept.rounding.transposed else -1
        grad_x = None if grad_x is None else torch.empty_like(grad_x).index_copy(-1, order, grad_x)
        grad_w = None if grad_w is None else torch.empty_like(grad_w).index_copy(k, order, grad_w)
    if pre_scale is None:
        return grad_x, grad_w
    along_k = pre_scale[:, None] if kept.rounding.transposed else pre_scale
    return (
        None if grad_x is None else grad_x * pre_scale.to(grad_x.dtype),
        None if grad_w is None else grad_w / along_k,
    )


def refuse_transforms() -> None:
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        raise ArgumentError(
            "torch.func and torch.vmap cannot transform products with weights in training, which have only the "
            "gradient of backward(): use that, or first convert_(model) or release_(model)"
        )


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if isinstance(input, TrainedTensor) or not isinstance(weight, TrainedTensor):
        raise ArgumentError("F.linear takes a weight in training as its weight only, not as its input")
    if weight.dim() != 2:
        raise ArgumentError(f"F.linear wants a weight [N, K]; this weight in training has shape {[*weight.shape]}")
    refuse_transforms()
    return Product.apply(autocasted(input), weight, bias)
