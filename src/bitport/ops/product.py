"""Matmul with one quantized matrix: F.linear calls one bitport op directly, ahead of PyTorch's dispatch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import TransformType
from torch.autograd import forward_ad

from bitport.errors import ArgumentError
from bitport.numerics import FLOATS
from bitport.ops import select
from bitport.ops.flops import tell_counters
from bitport.ops.linear import check_linear
from bitport.ops.linear_then import follow
from bitport.ops.table import OPS, gradient_of_bias, has_tangent, no_view
from bitport.ops.weight import Weight
from bitport.tensor import QTensor
from bitport.tensor.qtensor import KEPT

functorch = torch._C._functorch.peek_interpreter_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_any_autocast, _jit_tracer = torch._C._is_any_autocast_enabled, torch._C._get_tracing_state


def operand(q: QTensor) -> Weight:
    """The weight operand of ``q``. Built by tuple.__new__: the NamedTuple's constructor would double the time."""
    return tuple.__new__(Weight, (q.qdata, q.scale, q.zero, q.scale2, *q.matrix, q.bits_layout))


def _kept_operand(q: QTensor) -> Weight:
    """:func:`operand`, cached on the QTensor until one of its parts is replaced."""
    kept = q.__dict__.get(KEPT)
    if kept is None:
        kept = q.__dict__[KEPT] = operand(q)
    return kept


@functools.cache
def device_type(device: torch.device) -> str:
    """``device.type``, cached: creating the string takes twice as long as the lookup."""
    return device.type


def run(op: str, x: Tensor, *args: Any) -> Any:
    """Call an op for a QTensor, honouring a forced kernel. If PyTorch's dispatcher leads to the chooser, which handles
    forced kernels, the call goes through it, with autograd and tensor wrappers; a device's own kernel would ignore it.
    """
    if torch.compiler.is_compiling():
        return getattr(torch.ops.bitport, op).default(x, *args)
    if _dispatch_modes():
        tell_counters()
    kernel = select.forced(op)
    if kernel is not None and select.is_chooser(op, device_type(x.device)):
        select.named(kernel, op, x, *args)  # check here: meta and fake tensors do not reach the chooser
        kernel = None
    return select.call(op, x, *args, kernel=kernel)


def linear(input: Tensor, weight: QTensor, bias: Tensor | None = None) -> Tensor:
    """F.linear with a quantized weight."""
    if isinstance(input, QTensor) or not isinstance(weight, QTensor):
        raise ArgumentError("F.linear takes a quantized tensor as its weight only; dequantize() the input")
    if not weight.is_rows:
        if weight.dim() != 2:
            raise ArgumentError(f"F.linear wants a weight [N, K]; this QTensor has shape {[*weight.shape]}")
        return F.linear(input, weight.dequantize(input.dtype), bias)  # sums over N: a tied decoder
    return product(input, weight, bias)


def product(x: Tensor, q: QTensor, bias: Tensor | None = None) -> Tensor:
    """x [.., K] times the transposed matrix [N, K] behind q, plus bias.

    If nothing is traced, the kernel is called directly: PyTorch's dispatcher would reach the same kernel, only later,
    through the keys for autograd and transforms and after checking again a weight that was checked when it was made.
    """
    if (functorch() is not None or forward_ad._current_level >= 0) and differentiates(x, bias):
        return _product_of_floats(x, q, bias)
    x = prepare(x, q)
    act = q.scheme.act
    op, rest = ("dyn_linear", (act, act_scale_of(q), bias)) if act else ("linear", (bias,))
    if not torch.compiler.is_compiling() and _is_plain(x) and (bias is None or _has_values(bias)):
        device = device_type(x.device)
        kernel = select.DIRECT.get((op, device, q.bits_layout))
        if kernel is None and select.is_chooser(op, device):
            check_linear(x, q.qdata, q.matrix.n, q.matrix.k, bias)
            kernel = select.CHOOSERS[op]
        if kernel is not None:
            if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
                return _differentiated(x, bias, kernel, op, _kept_operand(q), rest[:-1])
            return kernel(x, *_kept_operand(q), *rest)
    return run(op, x, *operand(q), *rest)


def act_scale_of(q: QTensor) -> Tensor | None:
    """The static scale of the input; None if it is measured on every call."""
    if q.scheme.static and q.act_scale is None:
        raise ArgumentError(
            f"{q.scheme} has a static input scale, but none was calibrated: quantize_(.., calibrate=batches)"
        )
    return q.act_scale


def linear_then(input: Tensor, weight: Tensor, bias: Tensor | None, then: str, times: Tensor | None = None) -> Tensor:
    """``f(F.linear(input, weight, bias)) * times``, f from FOLLOWING: one op if the weight is quantized and nothing is
    differentiated, separate ops otherwise."""
    transformed = not torch.compiler.is_compiling() and (functorch() is not None or has_tangent(input, bias, times))
    if not isinstance(weight, QTensor) or not weight.is_rows or transformed:
        return follow(F.linear(input, weight, bias), then, times)
    x = prepare(input, weight)
    unlike = times is not None and (times.dtype != x.dtype or times.shape != (*x.shape[:-1], weight.matrix.n))
    learned = any(tensor is not None and tensor.requires_grad for tensor in (input, bias, times))
    if unlike or (learned and torch.is_grad_enabled()):
        return follow(F.linear(input, weight, bias), then, times)
    act = weight.scheme.act
    op, rest = ("dyn_linear_then", (act, act_scale_of(weight), bias)) if act else ("linear_then", (bias,))
    plain = not torch.compiler.is_compiling() and _is_plain(x)
    if plain and all(each is None or _has_values(each) for each in (bias, times)):
        kernel = select.DIRECT.get((op, device_type(x.device), weight.bits_layout))
        if kernel is not None:
            return kernel(x, *_kept_operand(weight), *rest, then, times)
    return run(op, x, *operand(weight), *rest, then, times)


def differentiates(*tensors: Tensor | None) -> bool:
    """Whether a torch.func transform such as grad or jvp is active, or forward-mode AD on ``tensors``: these have no
    derivative of our ops. Always False under Dynamo, which cannot trace this function."""
    if torch.compiler.is_dynamo_compiling():
        return False
    kinds = (TransformType.Grad, TransformType.Jvp)
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() in kinds for level in levels) or has_tangent(*tensors)


def _product_of_floats(x: Tensor, q: QTensor, bias: Tensor | None) -> Tensor:
    if q.scheme.act:
        raise ArgumentError(
            f"torch.func cannot differentiate {q.scheme}, which rounds its input, nor can forward-mode AD; "
            f"use autograd (backward())"
        )
    rows = q.replace(shape=(q.matrix.n, q.matrix.k), transposed=False)
    return F.linear(x, rows.dequantize(x.dtype), bias)


class _Product(torch.autograd.Function):
    """The op's gradient as at PyTorch's dispatcher, at a tenth of the cost (5 us, not 50). x is not saved: the gradient
    of a product with a constant does not depend on it. ``rounding``: the arguments between weight and bias, (act,
    act_scale) for ops that round inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        kernel: Callable[..., Tensor],
        op: str,
        weight: Weight,
        rounding: tuple[Any, ...],
    ) -> Tensor:
        ctx.op, ctx.weight, ctx.bias_dtype = op, weight, None if bias is None else bias.dtype
        return no_view(kernel(x, *weight, *rounding, bias))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        wants_x, wants_bias = ctx.needs_input_grad[:2]
        grad_x = OPS[ctx.op].backward(grad, None, *ctx.weight) if wants_x else None  # type: ignore[misc]
        grad_bias = gradient_of_bias(grad, ctx.bias_dtype) if wants_bias else None
        return grad_x, grad_bias, None, None, None, None


_differentiated = super(torch.autograd.Function, _Product).apply
"""_Product.apply without its wrapper for function transforms (3 us), which _is_plain has ruled out."""


def _is_plain(x: Tensor) -> bool:
    """Whether ``x`` is an ordinary tensor whose memory holds its values, and no dispatch mode, function transform or
    torch.jit.trace is active."""
    seen = _dispatch_modes() or functorch() is not None or _jit_tracer() is not None
    return type(x) is Tensor and not seen and not x.is_neg()


_OWN_MEMORY = (Tensor, torch.nn.Parameter)


def _has_values(part: Tensor) -> bool:
    """Whether the memory of ``part`` holds its values, so that a kernel may read it. That of a DTensor does not: its
    address is 0."""
    return type(part) in _OWN_MEMORY and not part.is_neg()


def autocasts(x: Tensor) -> bool:
    return _any_autocast() and x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def autocasted(x: Tensor) -> Tensor:
    """Cast the input of a matmul to the autocast dtype if autocast is on; float64 and non-floats are left alone."""
    return x.to(torch.get_autocast_dtype(x.device.type)) if autocasts(x) and x.dtype in FLOATS else x


def prepare(x: Tensor, q: QTensor) -> Tensor:
    """Apply autocast, then the pre-scale (AWQ, SmoothQuant), then the column permutation (act-order)."""
    return in_code_order(autocasted(x), q)


def in_code_order(x: Tensor, q: QTensor) -> Tensor:
    """Apply pre_scale and perm to rows of the input, or of anything in value order, so that they match the codes."""
    if q.pre_scale is None and q.perm is None:
        return x
    if x.dim() == 0 or x.size(-1) != q.matrix.k:  # a single column would broadcast over all scales
        raise ArgumentError(f"x must have shape [..., {q.matrix.k}] for {q!r}, not {[*x.shape]}")
    if q.pre_scale is not None:
        x = x * q.pre_scale.to(x.dtype)
    if q.perm is not None:
        x = x.gather(-1, q.perm.long().expand(x.shape))  # several times faster than index_select on a CPU
    return x
