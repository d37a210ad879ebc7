"""Triton's interpreter, with what it does to bfloat16 put right: it multiplies the bit patterns and cuts where it
should round. It also reads every scale of a scaled product as a power of two. Kernels are tried as they are; only the
interpreter is changed, in a process that is there for that."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def _rounded(value: Any) -> Any:
    return torch.from_numpy(np.ascontiguousarray(value, np.float32)).bfloat16().view(torch.uint16).numpy()


def _widened(handle: TensorHandle) -> TensorHandle:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    bits = torch.from_numpy(np.ascontiguousarray(handle.data))
    return TensorHandle(bits.view(torch.bfloat16).float().numpy(), tl.float32)


def correct_bfloat16() -> None:
    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def correct_cast(self: Any, source: TensorHandle, target: Any) -> TensorHandle:
        kind = target.scalar
        if kind == tl.bfloat16 and source.dtype.scalar != tl.bfloat16:
            return TensorHandle(_rounded(source.data), kind)
        return cast(self, source if kind == tl.bfloat16 else _widened(source), target)

    def correct_dot(self: Any, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
        return dot(self, _widened(a), _widened(b), *rest)

    for name in ("si_to_fp", "ui_to_fp", "fp_to_si", "fp_to_ui", "fp_ext", "fp_trunc"):
        setattr(InterpreterBuilder, f"create_{name}", correct_cast)
    InterpreterBuilder.cast_impl = correct_cast
    InterpreterBuilder.create_dot = correct_dot


def correct_scales() -> None:
    power_of_two = interpreter._dot_scaled_scale_to_f32

    def correct(handle: TensorHandle, kind: Any) -> Any:
        if handle.dtype.scalar != tl.float8e4nv:
            return power_of_two(handle, kind)
        return torch.from_numpy(np.ascontiguousarray(handle.data)).view(torch.float8_e4m3fn).float().numpy()

    interpreter._dot_scaled_scale_to_f32 = correct
