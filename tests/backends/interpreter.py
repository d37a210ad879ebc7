"""Fixes for Triton's interpreter, used only in the separate processes of these tests, so that kernels run unmodified.

Its faults: it computes bfloat16 on bit patterns and truncates instead of rounding, has no float32 products as two
bfloat16 ones, reads NaN of float8_e4m3 as 480, takes every scale of a scaled product as a power of two, and lacks
CUDA's functions. That of Triton 3.6 has no bfloat16 constants, and takes a float argument that is subnormal or out of
range in float32 for float64.

It also skips work that takes two thirds of its time and changes nothing: patching Triton's functions for each function
that a kernel calls, deriving the properties of a type for each tensor, and computing every integer sum and product in
64 bits for an assertion that is off.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import ir
from triton.language.extra import libdevice
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def _rounded(value: Any) -> Any:
    return torch.from_numpy(np.ascontiguousarray(value, np.float32)).bfloat16().view(torch.uint16).numpy()


WIDENED = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}


def _widened(handle: TensorHandle) -> TensorHandle:
    if handle.dtype.scalar not in WIDENED:
        return handle
    bits = torch.from_numpy(np.ascontiguousarray(handle.data))
    return TensorHandle(bits.view(WIDENED[handle.dtype.scalar]).float().numpy(), tl.float32)


def _parts(handle: TensorHandle) -> tuple[TensorHandle, TensorHandle]:
    """The bfloat16 part of a float32, and the bfloat16 part of the rest."""
    whole = torch.from_numpy(np.ascontiguousarray(handle.data, np.float32))
    first = whole.bfloat16().float()
    rest = (whole - first).bfloat16().float()
    return TensorHandle(first.numpy(), tl.float32), TensorHandle(rest.numpy(), tl.float32)


SCALED = hasattr(interpreter, "_dot_scaled_scale_to_f32")
"""Whether this version has scaled products of blocks; 3.6 does not."""


def correct() -> None:
    _bfloat16()
    _byte_perm()
    _floats()
    if SCALED:
        _scales()
    _once()
    _types()
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _bfloat16() -> None:
    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def correct_cast(self: Any, source: TensorHandle, target: Any) -> TensorHandle:
        kind = target.scalar
        if kind == tl.bfloat16 and source.dtype.scalar != tl.bfloat16:
            return TensorHandle(_rounded(source.data), kind)
        return cast(self, source if kind == tl.bfloat16 else _widened(source), target)

    def correct_dot(self: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, how: Any, *rest: Any) -> TensorHandle:
        if how != ir.INPUT_PRECISION.BF16x3:
            return dot(self, _widened(a), _widened(b), d, how, *rest)
        (a, rest_of_a), (b, rest_of_b) = _parts(a), _parts(b)
        for one, other in ((rest_of_a, b), (a, rest_of_b), (a, b)):
            d = dot(self, one, other, d, how, *rest)
        return d

    convert = InterpreterBuilder.create_fp_to_fp

    def correct_convert(self: Any, source: TensorHandle, target: Any, rounding: Any) -> TensorHandle:
        if source.dtype.scalar == tl.float8e4nv:
            return correct_cast(self, _widened(source), target)
        return convert(self, source, target, rounding)

    InterpreterBuilder.create_fp_to_fp = correct_convert

    def constant(self: Any, value: float) -> TensorHandle:
        return TensorHandle(_rounded([value]), tl.bfloat16)

    InterpreterBuilder.get_bf16 = constant

    def correctly(plain: Any) -> Any:
        def compute(self: Any, a: TensorHandle, b: TensorHandle) -> TensorHandle:
            if a.dtype.scalar != tl.bfloat16:
                return plain(self, a, b)
            return TensorHandle(_rounded(plain(self, _widened(a), _widened(b)).data), tl.bfloat16)

        return compute

    for name in ("fadd", "fsub", "fmul"):
        setattr(InterpreterBuilder, f"create_{name}", correctly(getattr(InterpreterBuilder, f"create_{name}")))
    for name in ("si_to_fp", "ui_to_fp", "fp_to_si", "fp_to_ui", "fp_ext", "fp_trunc"):
        setattr(InterpreterBuilder, f"create_{name}", correct_cast)
    InterpreterBuilder.cast_impl = correct_cast
    InterpreterBuilder.create_dot = correct_dot
    options = interpreter.interpreter_builder.options
    object.__setattr__(options, "allowed_dot_input_precisions", (*options.allowed_dot_input_precisions, "bf16x3"))


def _byte_perm() -> None:
    """byte_perm as CUDA defines it: of the eight bytes of a and b, starting at the lowest of a, the low three bits of
    each of the four lowest nibbles of the selector pick one."""

    def byte_perm(a: tl.tensor, b: tl.tensor, selector: Any) -> tl.tensor:
        widest = max(
            (each for each in (a, b, selector) if isinstance(each, tl.tensor)), key=lambda each: len(each.shape)
        )
        low, high, chosen = (
            np.asarray(each.handle.data if isinstance(each, tl.tensor) else each).astype(np.int64)
            for each in (a, b, selector)
        )
        pool, found = low & 0xFFFFFFFF | (high & 0xFFFFFFFF) << 32, 0
        for at in range(4):
            found = found | (pool >> 8 * (chosen >> 4 * at & 7) & 0xFF) << 8 * at
        data = np.broadcast_to(found, np.shape(widest.handle.data)).astype(np.uint32).view(np.int32)
        return tl.tensor(TensorHandle(data, tl.int32), widest.type)

    libdevice.byte_perm = byte_perm


def _scales() -> None:
    power_of_two = interpreter._dot_scaled_scale_to_f32

    def correct(handle: TensorHandle, kind: Any) -> Any:
        if handle.dtype.scalar != tl.float8e4nv:
            return power_of_two(handle, kind)
        return torch.from_numpy(np.ascontiguousarray(handle.data)).view(torch.float8_e4m3fn).float().numpy()

    interpreter._dot_scaled_scale_to_f32 = correct


def _floats() -> None:
    convert = interpreter._implicit_cvt

    def correct(argument: Any) -> Any:
        if isinstance(argument, float):
            return tl.tensor(TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)
        return convert(argument)

    interpreter._implicit_cvt = correct


def _once() -> None:
    """Patch a module's functions once per launch, after which they are restored."""
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done: set[Any] = set()

    def patch_once(function: Any) -> Any:
        found = {each for each in (tl, tl.core) if any(value is each for value in function.__globals__.values())}
        if found and found <= done:
            return interpreter._LangPatchScope()
        done.update(found)
        return patch(function)

    def launch_anew(self: Any, *args: Any, **constants: Any) -> None:
        done.clear()
        launch(self, *args, **constants)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_anew


def _types() -> None:
    """Cache what depends only on the type."""
    numpy_type = interpreter._get_np_dtype
    make_block, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    numpy_types: dict[str, Any] = {}
    blocks: dict[Any, dict[str, Any]] = {}
    tensors: dict[str, dict[str, Any]] = {}

    def remembered_numpy(kind: Any) -> Any:
        if kind.name not in numpy_types:
            numpy_types[kind.name] = numpy_type(kind)
        return numpy_types[kind.name]

    def remembered_block(self: Any, element: Any, shape: Any) -> None:
        key = (element.name, *(getattr(size, "value", size) for size in shape))
        if key not in blocks:
            make_block(self, element, shape)
            blocks[key] = {**vars(self)}
        vars(self).update(blocks[key])

    def remembered_tensor(self: Any, handle: Any, kind: Any) -> None:
        if kind.name not in tensors:
            make_tensor(self, handle, kind)
            tensors[kind.name] = {**vars(self)}
        vars(self).update(tensors[kind.name], handle=handle)

    interpreter._get_np_dtype = remembered_numpy
    tl.block_type.__init__, tl.tensor.__init__ = remembered_block, remembered_tensor
