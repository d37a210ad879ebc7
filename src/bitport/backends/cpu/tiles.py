"""Ops on weights in cpu_tiles by the native library. Each takes every weight that the layout can hold."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bitport.backends.aten.dense_mm import product
from bitport.backends.cpu import crossovers
from bitport.backends.cpu.native import Library
from bitport.layouts.cpu_tiles import CpuTiles
from bitport.numerics import ACTIVATIONS, FLOATS, STATIC, choose_qparams, fake_quantize
from bitport.ops import Impl, Weight, register_kernel
from bitport.ops.by_rows import DISTANCES
from bitport.ops.grouped import spans
from bitport.ops.linear_then import follow
from bitport.ops.native_codes import rounds

LAYOUT = CpuTiles()


def refuses(weight: Weight) -> str | None:
    if weight.layout != LAYOUT.name:
        return f"the weight must be in layout {LAYOUT.name}, not {weight.layout}"
    return LAYOUT.refuses(weight.matrix, weight.parts)


def second_refuses(x: Tensor, *rest: Any) -> str | None:
    return refuses(Weight(*rest[:10]))


def linear_refuses(x: Tensor, *rest: Any) -> str | None:
    weight = Weight(*rest[:10])
    if reason := refuses(weight):
        return reason
    return crossovers.refuses(weight, x.numel() // weight.k) if crossovers.MOST_ROWS else None


def third_refuses(x: Tensor, ends: Tensor, *rest: Any) -> str | None:
    return refuses(Weight(*rest[:10]))


def dequantize_refuses(*args: Any) -> str | None:
    dtype = args[10]
    return refuses(Weight(*args[:10])) if dtype in FLOATS else f"the result must be 16- or 32-bit float, not {dtype}"


def _scale_of_all(x: Tensor, act: str) -> Tensor | None:
    """Return the scale that the rows of all experts share, if the activation format has one."""
    if not x.numel() or act not in STATIC:
        return None
    scale, _, scale2 = choose_qparams(x, ACTIVATIONS[act])
    return scale if scale2 is None else scale2


def register(library: Library) -> None:
    def linear(x: Tensor, *rest: Any) -> Tensor:
        return library.linear(x, Weight(*rest[:10]), rest[10])

    def dense_mm(x: Tensor, *rest: Any) -> Tensor:
        return product(x, library.dense(Weight(*rest[:10]), x.dtype), rest[10])

    def dyn_linear(x: Tensor, *rest: Any) -> Tensor:
        *weight, act, act_scale, bias = rest
        return rounded(x, Weight(*weight), act, act_scale, bias)

    def linear_then(x: Tensor, *rest: Any) -> Tensor:
        *weight, bias, then, times = rest
        return library.linear(x, Weight(*weight), bias, then=then, times=times)

    def dense_mm_then(x: Tensor, *rest: Any) -> Tensor:
        return follow(dense_mm(x, *rest[:11]), *rest[11:])

    def dyn_linear_then(x: Tensor, *rest: Any) -> Tensor:
        *parts, act, act_scale, bias, then, times = rest
        weight = Weight(*parts)
        if rounds(act, weight.dtype):
            return library.linear(x, weight, bias, act, act_scale, then, times)
        return follow(rounded(x, weight, act, act_scale, bias), then, times)

    def rounded(x: Tensor, weight: Weight, act: str, act_scale: Tensor | None, bias: Tensor | None) -> Tensor:
        """Let the library round x if it can; otherwise multiply the rounded input in float32 and round the result once,
        as the generic kernel does."""
        if rounds(act, weight.dtype):
            return library.linear(x, weight, bias, act, act_scale)
        return library.linear(fake_quantize(x, act, act_scale), weight, bias).to(x.dtype)

    def grouped_linear(x: Tensor, ends: Tensor, *rest: Any) -> Tensor:
        return by_expert(x, ends, Weight(*rest))

    def dyn_grouped_linear(x: Tensor, ends: Tensor, *rest: Any) -> Tensor:
        *parts, act = rest
        weight = Weight(*parts)
        if rounds(act, weight.dtype):
            return by_expert(x, ends, weight, act, _scale_of_all(x, act))
        return by_expert(fake_quantize(x, act), ends, weight).to(x.dtype)

    def by_expert(x: Tensor, ends: Tensor, weight: Weight, act: str = "", act_scale: Tensor | None = None) -> Tensor:
        """Multiply expert by expert, skipping those without rows; rows past the last end give zeros."""
        y = x.new_zeros(x.shape[0], weight.n)
        for expert, rows in spans(ends, x.shape[0]):
            if rows.stop > rows.start:
                parts = [None if part is None else part[expert] for part in weight[:4]]
                own = Weight(*parts, *weight[4:])  # type: ignore[arg-type, call-arg]
                y[rows] = library.linear(x[rows], own, None, act, act_scale)
        return y

    def embedding(ids: Tensor, *rest: Any) -> Tensor:
        return library.rows(ids, Weight(*rest[:10]), rest[10])

    def dequantize(*args: Any) -> Tensor:
        weight, dtype = Weight(*args[:10]), args[10]
        if not weight.batch:
            return library.dense(weight, dtype)
        matrices = zip(*(([None] * len(weight.data) if part is None else part) for part in weight[:4]), strict=True)
        dense = weight.data.new_empty((*weight.batch, weight.n, weight.k), dtype=dtype)
        for at, parts in enumerate(matrices):
            dense[at] = dequantize(*parts, *weight[4:], dtype)
        return dense

    def distance(value: Tensor, weight: Weight) -> Tensor | None:
        return None if value.dtype not in FLOATS or refuses(weight) else library.distance(value, weight)

    DISTANCES["cpu"] = distance
    for name, run, supports in (
        ("linear", linear, linear_refuses),
        ("dyn_linear", dyn_linear, second_refuses),
        ("linear_then", linear_then, linear_refuses),
        ("dyn_linear_then", dyn_linear_then, second_refuses),
        ("grouped_linear", grouped_linear, third_refuses),
        ("dyn_grouped_linear", dyn_grouped_linear, third_refuses),
        ("embedding", embedding, second_refuses),
        ("dequantize", dequantize, dequantize_refuses),
    ):
        register_kernel(Impl(name, "native", "cpu", run, supports, priority=10))
    register_kernel(Impl("linear", "dense_mm", "cpu", dense_mm, second_refuses, priority=5))
    register_kernel(Impl("linear_then", "dense_mm", "cpu", dense_mm_then, second_refuses, priority=5))
