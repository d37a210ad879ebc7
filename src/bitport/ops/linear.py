"""linear and dyn_linear: y = x W^T + bias with a quantized W [N, K]."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bitport import layouts
from bitport.errors import ArgumentError
from bitport.numerics import ACTIVATIONS, FLOATS, STATIC, fake_quantize
from bitport.ops import samples
from bitport.ops.select import declare
from bitport.ops.table import Op, Sample
from bitport.ops.weight import SCHEMA, Weight, check_weight


def check_dense(name: str, x: Tensor) -> None:
    """Raise ArgumentError for a nested or sparse tensor."""
    if x.is_nested:
        raise ArgumentError(
            f"{name} is a nested tensor of the layout {x.layout}; a quantized weight takes it as "
            f"torch.nested.nested_tensor(.., layout=torch.jagged)"
        )
    if x.layout != torch.strided:
        raise ArgumentError(f"{name} is of the layout {x.layout}; a quantized weight takes dense ones: .to_dense()")


def check_linear(x: Tensor, data: Tensor, n: int, k: int, bias: Tensor | None) -> None:
    """Raise ArgumentError unless x and bias fit an n x k weight and are on the device of ``data``."""
    check_dense("x", x)
    if x.dtype not in FLOATS:
        raise ArgumentError(f"x must be float32, bfloat16 or float16, not {x.dtype}")
    shape, device = x.shape, x.device
    if not shape or shape[-1] != k:
        raise ArgumentError(f"x must have shape [..., {k}] for a weight of {n}x{k}, not {[*shape]}")
    if device != data.device:
        raise ArgumentError(f"x is on {device}, the weight on {data.device}; move both to one device")
    if bias is not None:
        if bias.shape != (n,) or not bias.is_floating_point():
            raise ArgumentError(f"bias must be float [{n}], not {bias.dtype} {[*bias.shape]}")
        if bias.device != device:
            raise ArgumentError(f"bias is on {bias.device}, x on {device}; move both to one device")


def _check_single(data: Tensor, layout: str) -> None:
    if data.dim() != layouts.layout(layout).data_ndim:
        raise ArgumentError(f"linear takes one weight; data {[*data.shape]} is no single matrix: use grouped_linear")


# -- linear: the input is not rounded --------------------------------------------------------------------------------


def _check(x: Tensor, data: Tensor, *rest: Any) -> None:
    check_linear(x, data, rest[4], rest[5], rest[9])
    check_weight(data, *rest[:9])
    _check_single(data, rest[8])


def _generic(x: Tensor, *rest: Any) -> Tensor:
    """y = x W^T + bias in x's dtype, W rounded once to x's dtype. x is made contiguous because for a non-contiguous 3-D
    input torch adds the bias to an already rounded matmul."""
    *weight, bias = rest
    return dense_linear(x.contiguous(), Weight(*weight), None if bias is None else bias.to(x.dtype))


def dense_linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """F.linear with the weight dequantized to x's dtype, a stretch of its rows after the other."""
    parts = [
        F.linear(x, some.dense(x.dtype), None if bias is None else bias[rows])
        for rows, some in weight.stretches(x.dtype)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _fake(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], rest[5]))


def _backward(grad: Tensor, x: Tensor, *rest: Any) -> Tensor:
    return grad @ torch.ops.bitport.dequantize(*rest[:10], grad.dtype)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for sample in samples.weights(device, dtype, weight_only=True):
        for name, x in (*samples.inputs(device, dtype, sample.weight.k), _nan(device, dtype, sample.weight.k)):
            yield _weight_only(sample, name, x)
    for sample in samples.weights(device, dtype, weight_only=True, large=True):
        for name, x in _large(device, dtype, sample.weight):
            yield _weight_only(sample, name, x)


def _weight_only(sample: samples.WeightSample, kind: str, x: Tensor) -> Sample:
    bias = samples.bias(x.device, x.dtype, sample.weight.n, kind)
    return _product(f"{sample.name}-{kind}", (x, *_lying(sample, kind), bias), x, sample.value, bias)


def _lying(sample: samples.WeightSample, kind: str) -> Weight:
    """The weight; non-contiguous for "strided" inputs, with scales of another dtype for "batch"."""
    if kind == "batch":
        return samples.wider(sample.weight)
    return samples.apart(sample.weight) if kind == "strided" else sample.weight


def _nan(device: torch.device, dtype: torch.dtype, k: int) -> tuple[str, Tensor]:
    return "expanded-nan", samples.with_nan(device, dtype, k)


def _large(device: torch.device, dtype: torch.dtype, weight: Weight) -> Iterator[tuple[str, Tensor]]:
    """Inputs for a large weight; also one row, for which many devices have special kernels."""
    yield "large", samples.rows_for(device, dtype, samples.LARGE_ROWS, weight)
    yield "large-row", samples.rows_for(device, dtype, 1, weight)


def _product(name: str, args: tuple[Any, ...], rows: Tensor, value: Tensor, bias: Tensor | None) -> Sample:
    def expected() -> Tensor:
        return F.linear(rows.cpu().double(), value, None if bias is None else bias.cpu().double())

    n, k = value.shape
    count = samples.independent(samples.rows_apart(args[0]), n)
    return Sample(name, args, expected, samples.product_budget(args[0].dtype, k, count))


LINEAR = Op(
    "linear",
    f"(Tensor x, {SCHEMA}, Tensor? bias) -> Tensor",
    check=_check,
    generic=_generic,
    fake=_fake,
    samples=_samples,
    backward=_backward,
    bias_at=11,
)


# -- dyn_linear: the input is rounded first --------------------------------------------------------------------------


def check_activation(x: Tensor, act: str, act_scale: Tensor | None) -> None:
    if act not in ACTIVATIONS:
        raise ArgumentError(f"unknown activation {act!r}; known: {', '.join(ACTIVATIONS)}")
    if act_scale is not None:
        if act not in STATIC:
            raise ArgumentError(f"act_scale is for {', '.join(STATIC)}, not for {act!r}")
        if act_scale.numel() != 1 or act_scale.dtype != torch.float32 or act_scale.device != x.device:
            given = f"{act_scale.dtype} {[*act_scale.shape]} on {act_scale.device}"
            raise ArgumentError(f"act_scale must be one float32 number on {x.device}, not {given}")


def _check_dyn(x: Tensor, data: Tensor, *rest: Any) -> None:
    check_linear(x, data, rest[4], rest[5], rest[11])
    check_weight(data, *rest[:9])
    _check_single(data, rest[8])
    check_activation(x, rest[9], rest[10])


def _generic_dyn(x: Tensor, *rest: Any) -> Tensor:
    """y = round(x) W^T + bias: both factors exact in float32, sums in float32, the result rounded to x's dtype.

    ``act`` names how each row of x is rounded (ACTIVATIONS); ``act_scale`` fixes its scale.
    """
    *weight, act, act_scale, bias = rest
    rounded = fake_quantize(x, act, act_scale)
    return dense_linear(rounded, Weight(*weight), None if bias is None else bias.float()).to(x.dtype)


def _rows_apart(x: Tensor, *rest: Any) -> bool:
    *_, act, act_scale, _bias = rest
    return act_scale is not None or act not in STATIC


def _samples_dyn(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for sample in samples.weights(device, dtype, weight_only=False):
        inputs = [*samples.inputs(device, dtype, sample.weight.k)]
        if sample.scheme.act not in STATIC:  # otherwise a NaN is in the scale of all rows
            inputs.append(_nan(device, dtype, sample.weight.k))
        for name, x in inputs:
            yield _rounded(sample, name, x)
    for sample in samples.weights(device, dtype, weight_only=False, large=True):
        for name, x in _large(device, dtype, sample.weight):
            yield _rounded(sample, name, x)


def _rounded(sample: samples.WeightSample, kind: str, x: Tensor) -> Sample:
    act, scale = sample.scheme.act, samples.act_scale(x, sample.scheme)
    bias = samples.bias(x.device, x.dtype, sample.weight.n, kind)
    args = (x, *_lying(sample, kind), act, scale, bias)
    return _product(f"{sample.name}-{kind}", args, fake_quantize(x, act, scale), sample.value, bias)


DYN_LINEAR = Op(
    "dyn_linear",
    f"(Tensor x, {SCHEMA}, str act, Tensor? act_scale, Tensor? bias) -> Tensor",
    check=_check_dyn,
    generic=_generic_dyn,
    fake=_fake,
    samples=_samples_dyn,
    backward=_backward,
    bias_at=13,
    rows_apart=_rows_apart,
)

declare(LINEAR)
declare(DYN_LINEAR)
