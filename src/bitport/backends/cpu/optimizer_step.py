"""Optimizer steps by the native library, for all parameters in one call; bit for bit the same as
:func:`bitport.ops.optimizer_step.generic`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from bitport.backends.cpu.moment_tables import refuses_format, tables_of
from bitport.backends.cpu.native import TYPES, Library, typed
from bitport.numerics import FLOATS
from bitport.ops import Impl, register_kernel
from bitport.ops.optimizer_step import STEP, Moment, Numbers, ParamStep

RULES = {"adam": 0, "lion": 1, "sgd": 2}


class KeptMoment(ctypes.Structure):
    """BitportMoment"""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("map", ctypes.c_void_p),
        ("type", ctypes.c_int32),
        ("key", ctypes.c_uint32),
    )


class Step(ctypes.Structure):
    """BitportStep"""

    _fields_ = (
        ("param", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("moments", KeptMoment * 2),
        *((name, ctypes.c_int64) for name in ("n", "k", "before")),
        *((name, ctypes.c_float) for name in Numbers._fields),
        *((name, ctypes.c_int32) for name in ("type", "grad_type", "count", "by_chance")),
        ("key", ctypes.c_uint32),
    )


def refuses(rule: str, target: ParamStep) -> str | None:
    param, grad = target.param, target.grad
    if type(param) not in (Tensor, Parameter) or type(grad) is not Tensor:
        return "parameter and gradient must be plain tensors"
    if param.dtype not in FLOATS or grad.dtype not in FLOATS:
        return f"parameter and gradient must be float32, bfloat16 or float16, not {param.dtype} and {grad.dtype}"
    if not param.is_contiguous():
        return "the parameter must be contiguous"
    for moment in target.moments:
        if moment.format is None:
            if moment.data.dtype not in (torch.float32, torch.bfloat16) or not moment.data.is_contiguous():
                return "moments without codes must be contiguous float32 or bfloat16"
        elif reason := _refuses_codes(moment):
            return reason
    blocks = {moment.format.block[1] for moment in target.moments if moment.format is not None}
    return "moments must have one block" if len(blocks) > 1 else None


def _refuses_codes(moment: Moment) -> str | None:
    fmt, scale = moment.format, moment.scale
    assert fmt is not None
    assert scale is not None
    if reason := refuses_format(fmt):
        return reason
    if scale.dtype != torch.float32:
        return f"scales must be float32, not {scale.dtype}"
    return None if moment.data.is_contiguous() and scale.is_contiguous() else "codes and scales must be contiguous"


def _described(target: ParamStep, kept: list[Tensor]) -> Step:
    param, grad = target.param, target.grad.contiguous().resolve_neg()
    kept.append(grad)
    keys = target.keys or (0, 0, 0)
    n, k, moments = 1, param.numel(), (KeptMoment * 2)()
    for at, (moment, key) in enumerate(zip(target.moments, keys[1:], strict=False)):
        data, scale, fmt, positive = moment
        if fmt is None or scale is None:
            moments[at] = KeptMoment(data.data_ptr(), None, None, TYPES[data.dtype], key)
        else:
            n = data.shape[0]
            tables = ctypes.addressof(tables_of(fmt, positive).map)
            moments[at] = KeptMoment(data.data_ptr(), scale.data_ptr(), tables, 0, key)
    return Step(
        param.data_ptr(),
        grad.data_ptr(),
        moments,
        n,
        k // n,
        0,
        *target.numbers,
        TYPES[param.dtype],
        TYPES[grad.dtype],
        len(target.moments),
        target.keys is not None,
        keys[0],
    )


def register(library: Library) -> None:
    i32 = ctypes.c_int32
    call = typed(library.functions.bitport_optimizer_step, [i32, ctypes.POINTER(Step), ctypes.c_int64, i32, i32], i32)

    def run(rule: str, targets: list[ParamStep]) -> None:
        kept: list[Tensor] = []
        steps = (Step * len(targets))(*(_described(target, kept) for target in targets))
        code = call(RULES[rule], steps, len(targets), torch.get_num_threads(), library.isa)
        library.check(code, f"{STEP} by {rule} of {len(targets)} parameters")
        increment_version([target.param for target in targets])  # as torch's in-place ops do, for autograd's checks

    register_kernel(Impl(STEP, "native", "cpu", run, refuses, priority=10))
