"""Ops on weights in cpu_tiles4, by the native library. Whatever the layout holds, each of them takes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bitport.backends.cpu.native import Library
from bitport.errors import ArgumentError
from bitport.layouts.cpu_tiles4 import SCALES, refuses_matrix, take_rows
from bitport.numerics import Quantized, fake_quantize
from bitport.ops import Impl, Weight, register_kernel

LAYOUT = "cpu_tiles4"


def refuses(weight: Weight) -> str | None:
    if weight.layout != LAYOUT:
        return f"the weight must be in layout {LAYOUT}, not {weight.layout}"
    if reason := refuses_matrix(weight.matrix):
        return reason
    for part in (weight.scale, weight.zero):
        if part is not None and part.dtype not in SCALES and (part is weight.scale or part.dtype.is_floating_point):
            return f"scale and float zero must be float32, bfloat16 or float16, not {part.dtype}"
    return None


def second_refuses(x: Tensor, *rest: Any) -> str | None:
    return refuses(Weight(*rest[:10]))


def third_refuses(x: Tensor, ends: Tensor, *rest: Any) -> str | None:
    return refuses(Weight(*rest[:10]))


def embedding(ids: Tensor, *rest: Any) -> Tensor:
    """Only the rows asked for are unpacked."""
    weight, dtype = Weight(*rest[:10]), rest[10]
    picked = take_rows(Quantized(*weight[:4]), ids.reshape(-1))
    rows = weight._replace(**picked._asdict(), n=ids.numel(), layout="plain")
    return rows.dense(dtype).reshape(*ids.shape, weight.k)


def register(library: Library) -> None:
    def linear(x: Tensor, *rest: Any) -> Tensor:
        return library.linear(x, Weight(*rest[:10]), rest[10])

    def dyn_linear(x: Tensor, *rest: Any) -> Tensor:
        """The rounded input and the sum in float32, then one rounding, as the generic kernel does."""
        *weight, act, act_scale, bias = rest
        return library.linear(fake_quantize(x, act, act_scale), Weight(*weight), bias).to(x.dtype)

    def grouped_linear(x: Tensor, ends: Tensor, *rest: Any) -> Tensor:
        return by_expert(x, ends, Weight(*rest))

    def dyn_grouped_linear(x: Tensor, ends: Tensor, *rest: Any) -> Tensor:
        *weight, act = rest
        return by_expert(fake_quantize(x, act), ends, Weight(*weight)).to(x.dtype)

    def by_expert(x: Tensor, ends: Tensor, weight: Weight) -> Tensor:
        """Experts without rows are not touched; rows past the last end give zeros."""
        y, start = x.new_zeros(x.shape[0], weight.n), 0
        for expert, end in enumerate(ends.tolist()):
            if not start <= end <= x.shape[0]:
                raise ArgumentError(f"ends must grow from 0 to at most {x.shape[0]} rows, not {ends.tolist()}")
            if end > start:
                zero = None if weight.zero is None else weight.zero[expert]
                own = weight._replace(data=weight.data[expert], scale=weight.scale[expert], zero=zero)
                y[start:end] = library.linear(x[start:end], own, None)
            start = end
        return y

    register_kernel(Impl("linear", "native", "cpu", linear, second_refuses, priority=10))
    register_kernel(Impl("dyn_linear", "native", "cpu", dyn_linear, second_refuses, priority=10))
    register_kernel(Impl("grouped_linear", "native", "cpu", grouped_linear, third_refuses, priority=10))
    register_kernel(Impl("dyn_grouped_linear", "native", "cpu", dyn_grouped_linear, third_refuses, priority=10))
    register_kernel(Impl("embedding", "tiles4_rows", "cpu", embedding, second_refuses, priority=10))
