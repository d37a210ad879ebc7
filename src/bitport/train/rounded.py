"""The rounded numbers of a weight in training, as operands of ops and as floats, by the kernels of its device."""

from __future__ import annotations

import torch
from torch import Tensor

from bitport import layouts
from bitport.numerics import ACTIVATIONS, Format, Quantized, fake_quantize
from bitport.ops.convert import from_list
from bitport.ops.product import operand as of_quantized
from bitport.ops.product import prepare, run
from bitport.ops.values import quantize_weight
from bitport.ops.weight import Weight
from bitport.tensor import matrix_of
from bitport.train.fixed import Fixed
from bitport.train.tensor import TrainedTensor


def operand(rows: Tensor, fmt: Format, act: str = "", fixed: Fixed | None = None) -> Weight:
    """Round the matrix ``rows`` [.., N, K] to ``fmt``, in the layout that its device prefers for products with inputs
    rounded according to ``act``: the same operand and kernels as in the quantized model."""
    parts = parts_of(rows, fmt, fixed)
    matrix = matrix_of(fmt, int(rows.shape[-2]), int(rows.shape[-1]))  # specializes traced sizes
    name = layouts.preferred(rows.device, matrix, parts, act)
    if name != "plain":
        parts = from_list(run("repack", *parts, *matrix, "plain", name))
    return Weight._make((*parts, *matrix, name))


def parts_of(rows: Tensor, fmt: Format, fixed: Fixed | None) -> Quantized:
    """The matrix ``rows`` rounded with its own scales, or with the fixed ones."""
    return quantize_weight(rows, fmt) if fixed is None else fixed.rounded(rows, fmt)


def operand_of(w: TrainedTensor) -> Weight:
    q = w.quantized
    return of_quantized(q) if q is not None else operand(w.rows(), w.scheme.weight, w.scheme.act, w.fixed)


def rounded_rows(rows: Tensor, fmt: Format, dtype: torch.dtype, fixed: Fixed | None = None) -> Tensor:
    """Floats [.., N, K]."""
    return run("dequantize", *operand(rows, fmt, "", fixed), dtype)


def rounded_input(x: Tensor, act: str, act_scale: Tensor | None) -> Tensor:
    """The input of a product as the product rounds it, in its own dtype."""
    if not act or not x.numel():
        return x
    if act_scale is not None or torch.compiler.is_compiling():  # a compiler fuses its elementwise ops into one kernel
        return fake_quantize(x, act, act_scale).to(x.dtype)
    return rounded_rows(x.reshape(-1, x.shape[-1]), ACTIVATIONS[act], x.dtype).reshape(x.shape)


def pre_scaled(x: Tensor, w: TrainedTensor) -> Tensor:
    """The input [.., K] as it is multiplied with the codes: pre-scaled and permuted."""
    q = w.quantized
    if q is not None:
        return prepare(x, q)
    return x if w.pre_scale is None else x * w.pre_scale.to(x.dtype)


def dense(w: TrainedTensor, dtype: torch.dtype, *, for_pre_scaled: bool = False) -> Tensor:
    """Floats in the shape of ``w``. ``for_pre_scaled``: to be multiplied with an output of :func:`pre_scaled`."""
    q = w.quantized
    if q is not None:
        return (q.replace(perm=None, pre_scale=None) if for_pre_scaled else q).dequantize(dtype)
    rows = rounded_rows(w.rows(), w.scheme.weight, dtype, w.fixed)
    rows = rows if for_pre_scaled else pre_scaled(rows, w)
    return rows.transpose(-1, -2) if w.rounding.transposed else rows.reshape(w.shape)
