"""matmul and related functions with a quantized factor: as a product with one matrix, as grouped products of experts,
or with the weight dequantized."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bitport.errors import ArgumentError
from bitport.numerics import FLOATS, STATIC
from bitport.ops import select
from bitport.ops.product import (
    act_scale_of,
    autocasted,
    autocasts,
    device_type,
    differentiates,
    functorch,
    operand,
    prepare,
    product,
    run,
)
from bitport.ops.table import OPS, has_tangent, refuse_tangents
from bitport.ops.values import rounded_input
from bitport.ops.weight import Weight
from bitport.tensor import QTensor
from bitport.tensor.qtensor import unsupported


def matmul(input: Tensor, other: Tensor) -> Tensor:
    """x [.., K] @ q where q is the transposed view [K, N] of a weight, or [E, K, N] of experts."""
    if isinstance(input, QTensor) and not isinstance(other, QTensor):
        return matmul(other, input.mT) if other.dim() == 1 else matmul(other.mT, input.mT).mT
    x, q = input, other
    if isinstance(x, QTensor) or not isinstance(q, QTensor):
        raise ArgumentError("a product takes one quantized factor; dequantize() the other")
    if not q.transposed:
        return x @ q.dequantize(x.dtype)
    if q.repeated:
        y, batch = product(x, q), torch.broadcast_shapes(x.shape[:-2], q.shape[:-2])
        return y.expand(*batch, *y.shape[-2:]).contiguous()
    if not q.batched:
        return product(x, q)
    if _has_few_for_each(x, q):
        return _few_for_each(x, q)
    if not q.scheme.act:
        return x @ q.dequantize(x.dtype)
    if (torch.is_grad_enabled() and x.requires_grad) or differentiates(x):
        raise ArgumentError(
            f"a batched product with {q.scheme}, which rounds its input, has no derivative; F.grouped_mm has that of "
            f"backward()"
        )
    x = prepare(x, q)
    rounded = rounded_input(x, q.scheme.act, act_scale_of(q))
    codes = q.replace(perm=None, pre_scale=None)
    # autocast would round both factors a second time
    with torch.autocast(x.device.type, enabled=False) if autocasts(x) else contextlib.nullcontext():
        return (rounded @ codes.dequantize(torch.float32)).to(x.dtype)


FEW_ROWS = 64
"""Largest number of rows per expert for which a matmul is bound by reading the weight, so that packed weights win."""


def _has_few_for_each(x: Tensor, q: QTensor) -> bool:
    """Whether to compute a batched matmul on packed weights: in eager mode, without a gradient, on a device with a
    kernel for it. The generic kernel reads data, and dequantizes all experts just like bmm."""
    if torch.compiler.is_compiling() or functorch() is not None or autocasts(x) or x.dtype not in FLOATS:
        return False
    act, fixed = q.scheme.act, q.act_scale is not None
    if act in STATIC and not fixed:  # one scale measured over all of x, but expert kernels scale rows by themselves
        return False
    if not select.IMPLS.get(("dyn_grouped_linear" if act and not fixed else "grouped_linear", device_type(x.device))):
        return False
    alike = x.dim() == q.dim() == 3 and x.shape[0] == q.shape[0] and 0 < x.shape[1] <= FEW_ROWS
    return alike and not (torch.is_grad_enabled() and x.requires_grad) and not has_tangent(x)


def _few_for_each(x: Tensor, q: QTensor) -> Tensor:
    """x [E, M, K] as a grouped matmul with M rows per expert."""
    experts, count, _ = x.shape
    ends = torch.arange(1, experts + 1, dtype=torch.int32, device=x.device) * count
    y = grouped(prepare(x, q).flatten(0, 1), ends, operand(q), q.scheme.act, act_scale_of(q))
    return y.unflatten(0, (experts, count))


def into_given(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``function`` with more arguments of torch's. ``out``: a tensor for the result. ``out_dtype``: float32, to which
    factors of 16 bits are widened, so that their product is not rounded to their dtype."""

    def product_into(*args: Any, out: Tensor | None = None, out_dtype: Any = None, **kwargs: Any) -> Tensor:
        y = function(*args, **kwargs) if out_dtype is None else _widened(function, out_dtype, args, kwargs)
        if out is None:
            return y
        if y.requires_grad or out.requires_grad:
            raise ArgumentError("what is written into out= has no derivative: leave it out, or use torch.no_grad()")
        if out.dtype != y.dtype:
            raise ArgumentError(f"out= receives a product {y.dtype} {[*y.shape]}, but is {out.dtype}")
        return torch.cat([y], out=out)

    return product_into


def _widened(function: Callable[..., Tensor], dtype: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    if dtype != torch.float32:
        raise ArgumentError(f"out_dtype= is torch.float32, for factors of 16 bits, not {dtype}")

    def wide(given: Any) -> Any:
        return given.to(dtype) if isinstance(given, Tensor) else given

    first = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
    with torch.autocast(first.device.type, enabled=False):
        return function(*map(wide, args), **{name: wide(each) for name, each in kwargs.items()})


def in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``function`` as a method that replaces its first argument by the result."""

    def replaced(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(input, QTensor):
            unsupported(f"aten.{function.__qualname__}_", input)
        return input.copy_(function(input, *args, **kwargs))

    return replaced


def _with_rank(name: str, rank: int) -> Callable[..., Tensor]:
    def product_of_rank(input: Tensor, mat2: Tensor) -> Tensor:
        if input.dim() != rank or mat2.dim() != rank:
            raise ArgumentError(f"{name} takes two {rank}-D tensors, not {[*input.shape]} and {[*mat2.shape]}")
        if input.shape[:-2] != mat2.shape[:-2]:
            raise ArgumentError(
                f"{name} takes the same number of matrices on both sides, not {[*input.shape]}, {[*mat2.shape]}"
            )
        return matmul(input, mat2)

    product_of_rank.__qualname__ = name  # shown in Python's TypeError for wrong arguments
    return product_of_rank


mm, bmm = _with_rank("mm", 2), _with_rank("bmm", 3)


def mv(input: Tensor, vec: Tensor) -> Tensor:
    if input.dim() != 2 or vec.dim() != 1:
        raise ArgumentError(f"mv takes a matrix and a vector, not {[*input.shape]} and {[*vec.shape]}")
    return matmul(input, vec)


def _added_to(product: Callable[..., Tensor], function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def sum_of(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        if isinstance(input, QTensor) and not isinstance(mat1, QTensor) and not isinstance(mat2, QTensor):
            return function(input.dequantize(), mat1, mat2, beta=beta, alpha=alpha)  # PEFT adds to experts this way
        y, other = product(mat1, mat2), autocasted(input)
        total = added(y, other, beta, alpha)
        if other.dtype != y.dtype or total.shape != y.shape:
            raise ArgumentError(
                f"{function.__name__} adds to a product {y.dtype} {[*y.shape]} what has its dtype and a shape that "
                f"broadcasts to it, not {other.dtype} {[*other.shape]}"
            )
        return total

    sum_of.__qualname__ = function.__name__
    return sum_of


addmm, _baddbmm = _added_to(mm, torch.addmm), _added_to(bmm, torch.baddbmm)


def baddbmm(input: Tensor, batch1: Tensor, batch2: Tensor, **kwargs: Any) -> Tensor:
    return _baddbmm(input, batch1, batch2, **kwargs)


def added(y: Tensor, input: Tensor, beta: float, alpha: float) -> Tensor:
    """alpha y + beta input; ``input`` is ignored, even NaN, if beta is 0."""
    y = y if alpha == 1 else y * alpha
    if beta == 0:
        return y
    return y + (input if beta == 1 else input * beta)


def einsum(equation: str, *operands: Any) -> Tensor:
    """torch.einsum, which lowers some equations to a batched matmul."""
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return torch.einsum(equation, *operands)
    except ArgumentError as error:
        raise ArgumentError(
            f"torch.einsum does not take a quantized weight in {equation!r}: use F.linear(x, weight), "
            f"x @ weight.mT or weight.dequantize()"
        ) from error


def grouped_mm(
    mat_a: Tensor, mat_b: QTensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> Tensor:
    """F.grouped_mm(x [T, K], q [E, K, N], offs), with q the transposed view of expert weights [E, N, K]."""
    x, q = mat_a, mat_b
    if offs is None or bias is not None or not isinstance(q, QTensor) or isinstance(x, QTensor):
        raise ArgumentError("a quantized grouped product takes (x, experts, offs=...), experts quantized and no bias")
    if not q.transposed:
        return F.grouped_mm(x, q.dequantize(x.dtype), offs=offs, out_dtype=out_dtype)
    y = grouped(prepare(x, q), offs, operand(q), q.scheme.act, act_scale_of(q))
    return y if out_dtype is None else y.to(out_dtype)


def grouped(x: Tensor, offs: Tensor, weight: Weight, act: str, act_scale: Tensor | None) -> Tensor:
    """Grouped matmul of packed experts. dyn_grouped_linear measures the scales of its inputs; with a static scale,
    inputs are rounded first and passed to grouped_linear."""
    if act and act_scale is not None:
        refuse_tangents(OPS["dyn_grouped_linear"], x)
        rounded = rounded_input(x, act, act_scale)
        if x.requires_grad:
            rounded = rounded + (x - x.detach())  # adds zero: a straight-through gradient
        return run("grouped_linear", rounded, offs, *weight).to(x.dtype)
    return run("dyn_grouped_linear", x, offs, *weight, act) if act else run("grouped_linear", x, offs, *weight)
