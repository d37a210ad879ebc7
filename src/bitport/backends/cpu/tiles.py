"""Ops on weights in cpu_tiles, by the native library. Whatever the layout holds, each of them takes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bitport.backends.cpu.native import ACTS, Library
from bitport.errors import ArgumentError
from bitport.layouts.cpu_tiles import SCALES, ZEROS, CpuTiles, refuses_matrix
from bitport.numerics import ACTIVATIONS, NUMBER_TYPES, choose_qparams, fake_quantize
from bitport.ops import Impl, Weight, register_kernel

LAYOUT = CpuTiles.name


def refuses(weight: Weight) -> str | None:
    if weight.layout != LAYOUT:
        return f"the weight must be in layout {LAYOUT}, not {weight.layout}"
    if reason := refuses_matrix(weight.matrix):
        return reason
    if weight.scale.dtype not in SCALES:
        return f"scales must be float32, bfloat16, float16, e8m0 or e4m3, not {weight.scale.dtype}"
    if weight.zero is not None and weight.zero.dtype not in ZEROS:
        return f"zeros must be uint8, float32, bfloat16 or float16, not {weight.zero.dtype}"
    return None


def second_refuses(x: Tensor, *rest: Any) -> str | None:
    return refuses(Weight(*rest[:10]))


def third_refuses(x: Tensor, ends: Tensor, *rest: Any) -> str | None:
    return refuses(Weight(*rest[:10]))


def register(library: Library) -> None:
    def linear(x: Tensor, *rest: Any) -> Tensor:
        return library.linear(x, Weight(*rest[:10]), rest[10])

    def dyn_linear(x: Tensor, *rest: Any) -> Tensor:
        """Integers by integers in the library; otherwise the rounded input and the sum in float32, then one rounding,
        as the generic kernel does."""
        *parts, act, act_scale, bias = rest
        weight = Weight(*parts)
        if act in ACTS and NUMBER_TYPES[weight.dtype].kind == "int":
            return library.linear(x, weight, bias, act, act_scale)
        return library.linear(fake_quantize(x, act, act_scale), weight, bias).to(x.dtype)

    def grouped_linear(x: Tensor, ends: Tensor, *rest: Any) -> Tensor:
        return by_expert(x, ends, Weight(*rest))

    def dyn_grouped_linear(x: Tensor, ends: Tensor, *rest: Any) -> Tensor:
        """What rounds a tensor as one is measured over the rows of all experts."""
        *parts, act = rest
        weight, scale = Weight(*parts), None
        if act in ACTS and NUMBER_TYPES[weight.dtype].kind == "int":
            fmt = ACTIVATIONS[act]
            if fmt.block == (0, 0) and x.numel():
                scale = choose_qparams(x, fmt)[0]
            return by_expert(x, ends, weight, act, scale)
        return by_expert(fake_quantize(x, act), ends, weight).to(x.dtype)

    def by_expert(x: Tensor, ends: Tensor, weight: Weight, act: str = "", act_scale: Tensor | None = None) -> Tensor:
        """Experts without rows are not touched; rows past the last end give zeros."""
        y, start = x.new_zeros(x.shape[0], weight.n), 0
        for expert, end in enumerate(ends.tolist()):
            if not start <= end <= x.shape[0]:
                raise ArgumentError(f"ends must grow from 0 to at most {x.shape[0]} rows, not {ends.tolist()}")
            if end > start:
                parts = [None if part is None else part[expert] for part in weight[:4]]
                own = Weight(*parts, *weight[4:])  # type: ignore[arg-type, call-arg]
                y[start:end] = library.linear(x[start:end], own, None, act, act_scale)
            start = end
        return y

    def embedding(ids: Tensor, *rest: Any) -> Tensor:
        return library.rows(ids, Weight(*rest[:10]), rest[10])

    for name, run, supports in (
        ("linear", linear, second_refuses),
        ("dyn_linear", dyn_linear, second_refuses),
        ("grouped_linear", grouped_linear, third_refuses),
        ("dyn_grouped_linear", dyn_grouped_linear, third_refuses),
        ("embedding", embedding, second_refuses),
    ):
        register_kernel(Impl(name, "native", "cpu", run, supports, priority=10))
