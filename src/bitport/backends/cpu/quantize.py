"""Round weights to nearest by the native library, bit for bit as :func:`bitport.numerics.quantize` does."""

from __future__ import annotations

import ctypes
import functools
import math

import torch
from torch import Tensor

from bitport.backends.cpu.native import TYPES, Library, typed
from bitport.layouts import large_pages
from bitport.numerics import NUMBER_TYPES, Format, packed_size
from bitport.numerics.codebooks import midpoints, zero_code
from bitport.ops import Impl, register_kernel
from bitport.ops.convert import parse_format, to_list, with_room

KINDS = {"int": 0, "float": 1, "codebook": 2}
RULES = {"floor": 0, "ceil": 1, "even": 2, "rceil": 3}


class FormatOfWeight(ctypes.Structure):
    """BitportFormat"""

    _fields_ = (
        ("thresholds", ctypes.c_void_p),
        ("block_n", ctypes.c_int64),
        ("block_k", ctypes.c_int64),
        ("largest", ctypes.c_float),
        *(
            (name, ctypes.c_int32)
            for name in ("kind", "bits", "mantissa", "nan_code", "scale_type", "rule", "zero_type", "global_")
        ),
        ("has_zero", ctypes.c_int32),
    )


@functools.cache
def _thresholds(table: tuple[float, ...]) -> ctypes.Array[ctypes.c_float]:
    values = midpoints(table)
    return (ctypes.c_float * len(values))(*values)


def _described(fmt: Format, n: int, k: int, dtype: torch.dtype) -> FormatOfWeight:
    number, zero = fmt.number, fmt.zero_dtype(dtype)
    codebook = number.kind == "codebook"
    return FormatOfWeight(
        ctypes.addressof(_thresholds(number.table)) if codebook else None,
        *fmt.block_shape(n, k),
        number.max,
        KINDS[number.kind],
        number.bits,
        number.mantissa_bits,
        zero_code(number.table) if codebook else number.nan_code,
        TYPES[fmt.scale_dtype(dtype)],
        RULES[fmt.scale_rule],
        -1 if zero is None else TYPES[zero],
        fmt.global_scale,
        number.has_zero or zero is not None,
    )


def register(library: Library) -> None:
    pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    taken = [ctypes.POINTER(FormatOfWeight), pointer, i32, i64, i64, *[pointer] * 4, i32, i32]
    call = typed(library.functions.bitport_quantize, taken, i32)

    @functools.cache
    def encodes(text: str, dtype: torch.dtype) -> bool:
        """Ask by a call without rows, which checks the format and writes nothing."""
        described = _described(parse_format(text), 0, 1, dtype)
        return call(described, None, TYPES[dtype], 0, 1, *[None] * 4, 1, library.isa) == 0

    def refuses(value: Tensor, text: str) -> str | None:
        if (dtype := parse_format(text).dtype) not in NUMBER_TYPES:
            return f"{dtype} is for states of optimizers; no weight is rounded to it"
        if not encodes(text, value.dtype):
            return f"the native library does not encode {dtype}"
        return None if value.numel() else f"an empty matrix has nothing to round: {[*value.shape]}"

    def run(value: Tensor, text: str) -> list[Tensor]:
        fmt, dtype = parse_format(text), value.dtype
        *batch, n, k = value.shape
        x = value.contiguous().resolve_neg()
        # in small pages, allocating many codes would take as long as computing them
        codes = large_pages.empty((*batch, n, packed_size(k, fmt.number.bits)), large_pages.KEPT + 1)
        parts = with_room(codes.view(fmt.number.storage), x, fmt)
        described, count = _described(fmt, n, k, dtype), math.prod(batch)
        for at in range(count):
            source, *places = (
                None if part is None else part.data_ptr() + part.nbytes // count * at for part in (x, *parts)
            )
            code = call(described, source, TYPES[dtype], n, k, *places, torch.get_num_threads(), library.isa)
            library.check(code, f"quantize of {n}x{k} in {dtype} to {fmt.dtype}")
        return to_list(parts)

    register_kernel(Impl("quantize", "native", "cpu", run, refuses, priority=10))
