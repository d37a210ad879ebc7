"""y = x W^T + bias with a W in training: forward by the kernels of the quantized model, backward as Rounding says.

    gradients None     gx = g rounded(W)       gw = g^T rounded(x)       in g's dtype
    Gradients          each of the two as a product of two rounded factors, if it has a scheme

What is kept from forward to backward is x and the codes of W, not W as floats.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitport.errors import ArgumentError
from bitport.ops.functional import run
from bitport.ops.weight import Weight
from bitport.schemes import Scheme
from bitport.train.rounded import operand, rounded_input
from bitport.train.tensor import TrainedTensor

DESCRIBED = slice(4, None)
"""The fields of Weight behind its four tensors."""


def rounded_product(left: Tensor, right: Tensor, scheme: Scheme) -> Tensor:
    """left [M, K] right^T [K, N], both rounded along K as ``scheme`` says."""
    return run("dyn_linear", left, *operand(right, scheme.weight, scheme.act), scheme.act, None, None)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: TrainedTensor, bias: Tensor | None) -> Tensor:
        scheme = w.scheme
        weight = operand(w.rows(), scheme.weight, scheme.act)
        ctx.save_for_backward(x, w, w.act_scale, *weight[:4])
        ctx.described, ctx.bias_dtype = weight[DESCRIBED], None if bias is None else bias.dtype
        if not scheme.act:
            return run("linear", x, *weight, bias)
        return run("dyn_linear", x, *weight, scheme.act, w.act_scale, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w, act_scale, *parts = ctx.saved_tensors
        wants_x, wants_w, wants_bias = ctx.needs_input_grad
        g, rows = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        grad_x = grad_w = grad_bias = None
        if wants_x:
            grad_x = grad_of_input(g, w, Weight(*parts, *ctx.described)).reshape(x.shape)
        if wants_w:
            grad_w = grad_of_weight(g, rows, w, act_scale)
        if wants_bias:
            grad_bias = g.sum(0).to(ctx.bias_dtype)
        return grad_x, grad_w, grad_bias


def grad_of_input(g: Tensor, w: TrainedTensor, weight: Weight) -> Tensor:
    gradients = w.rounding.gradients
    if gradients is None or gradients.input is None:
        return g @ run("dequantize", *weight, g.dtype)
    return rounded_product(g, w.rows().to(g.dtype).mT, gradients.input)


def grad_of_weight(g: Tensor, x: Tensor, w: TrainedTensor, act_scale: Tensor | None) -> Tensor:
    gradients = w.rounding.gradients
    if gradients is not None and gradients.weight is not None and len(g):
        grad = rounded_product(g.t().contiguous(), x.t(), gradients.weight)
    else:
        grad = g.t() @ rounded_input(x, w.scheme.act, act_scale)
    return (grad.t() if w.rounding.transposed else grad).to(w.dtype)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if isinstance(input, TrainedTensor) or not isinstance(weight, TrainedTensor):
        raise ArgumentError("F.linear takes a weight in training as its weight only, not as its input")
    if weight.rounding.transposed:
        raise ArgumentError("this weight is the transposed view [K, N]; F.linear wants [N, K]: pass weight.t()")
    kind = input.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        input = input.to(torch.get_autocast_dtype(kind))
    return Product.apply(input, weight, bias)
