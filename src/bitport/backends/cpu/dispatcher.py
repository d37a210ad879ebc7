"""The native kernels at PyTorch's dispatcher. ``native/torch`` looks up torch's stable C functions by name in the
loaded library and registers a kernel for every op of OPS. Such a kernel takes weights in cpu_tiles with plain,
contiguous tensors, or the tokens of a cache, and passes everything else to the overload ``choose``; so it does with all
calls while ``native`` is not the first kernel to ask, because one is forced or one of higher priority is registered.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bitport.backends.cpu.native import PATH, Library, table_of, typed
from bitport.errors import KernelError
from bitport.layouts.cpu_tiles import CpuTiles
from bitport.numerics import NUMBER_TYPES
from bitport.ops import select
from bitport.ops.native_codes import ACTS, THEN
from bitport.ops.table import lost_type

TILED = ("linear", "dyn_linear", "linear_then", "dyn_linear_then", "grouped_linear", "dyn_grouped_linear", "embedding")
OPS = {**dict.fromkeys(TILED, CpuTiles.name), "attention": "plain"}
"""Each op -> the layout that its kernel here takes."""
NAMES = {"win32": "torch_cpu.dll", "darwin": "libtorch_cpu.dylib"}
TORCH = Path(torch.__file__).with_name("lib") / NAMES.get(sys.platform, "libtorch_cpu.so")
KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def register(library: Library) -> str | None:
    """Register the kernels; return None, or why they can only be called through ctypes."""
    text, i32, functions = ctypes.c_char_p, ctypes.c_int32, library.functions
    name_type = typed(functions.bitport_name_type, [text, i32, i32, ctypes.POINTER(ctypes.c_float)], i32)
    name_rounding = typed(functions.bitport_name_rounding, [text, i32], i32)
    name_activation = typed(functions.bitport_name_activation, [text, i32], i32)
    take_calls = typed(functions.bitport_take_calls, [text, i32], i32)
    reason = typed(functions.bitport_register_torch, [text], text)(bytes(TORCH))
    if reason is not None:
        return str(reason.decode())
    functions.bitport_torch_isa(library.isa)
    for name, number in NUMBER_TYPES.items():
        _agreed(name_type(name.encode(), number.bits, number.kind == "int", table_of(name)), name)
    for name, act in ACTS.items():
        _agreed(name_rounding(name.encode(), act), name)
    for name, then in THEN.items():
        _agreed(name_activation(name.encode(), then), name)

    direct = {op: _direct(op) for op in OPS}

    def follow() -> None:
        for op, layout in OPS.items():
            on = select.first(op, "cpu") == "native"
            _agreed(take_calls(f"bitport::{op}".encode(), on), op)
            if on:
                select.DIRECT[op, "cpu", layout] = direct[op]
            else:
                select.DIRECT.pop((op, "cpu", layout), None)

    follow()
    select.WATCHERS.append(follow)
    return None


def _direct(op: str) -> Callable[..., Any]:
    """Return the op dispatched directly to the CPU key, for tensors that need no other key."""
    call = getattr(torch.ops.bitport, op).default._handle.redispatch_boxed

    def direct(*args: Any) -> Any:
        try:
            return call(KEYS, *args)
        except RuntimeError as error:
            if not lost_type(op, error):
                raise
        return select.checked(op, *args)

    return direct


def _agreed(code: int, name: str) -> None:
    if code:
        raise KernelError(
            f"{PATH.name} does not know {name}: it was compiled from another version of bitport; reinstall"
        )
