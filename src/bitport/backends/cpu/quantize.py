"""Round weights to nearest by the native library, bit for bit as :func:`bitport.numerics.quantize` does."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bitport.backends.cpu.native import TYPES, Library, address, typed
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


class Places(ctypes.Structure):
    """BitportPlaces"""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scale", "zero", "scale2")),
        *((name, ctypes.c_int64) for name in ("codes_apart", "scale_apart", "zero_apart")),
    )


def _places(parts: Sequence[Tensor | None], scale2: Tensor | None = None, rows: Sequence[int] = (0, 0, 0)) -> Places:
    """Codes, scales and zeros, contiguous, from a row of each matrix on."""
    starts = map(_start, parts, rows)
    return Places(*starts, address(scale2), *map(_apart, parts))


def _start(part: Tensor | None, row: int) -> int | None:
    return None if part is None else part.data_ptr() + row * part.stride(-2) * part.element_size()


def _apart(part: Tensor | None) -> int:
    """The bytes from a matrix to the next."""
    return 0 if part is None or part.dim() < 3 else part.stride(-3) * part.element_size()


@functools.cache
def _thresholds(table: tuple[float, ...]) -> ctypes.Array[ctypes.c_float]:
    values = midpoints(table)
    return (ctypes.c_float * len(values))(*values)


@functools.lru_cache(maxsize=256)
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
    taken = [ctypes.POINTER(FormatOfWeight), pointer, i32, i64, i64, i64, ctypes.POINTER(Places), i32, i32]
    call = typed(library.functions.bitport_quantize, taken, i32)

    @functools.cache
    def encodes(text: str, dtype: torch.dtype) -> bool:
        """Ask by a call without rows, which checks the format and writes nothing."""
        described = _described(parse_format(text), 0, 1, dtype)
        return call(described, None, TYPES[dtype], 1, 0, 1, Places(), 1, library.isa) == 0

    def refuses(value: Tensor, text: str) -> str | None:
        if (dtype := parse_format(text).dtype) not in NUMBER_TYPES:
            return f"{dtype} is for states of optimizers; no weight is rounded to it"
        if not encodes(text, value.dtype):
            return f"the native library does not encode {dtype}"
        return None if value.numel() else f"an empty matrix has nothing to round: {[*value.shape]}"

    def write(value: Tensor, fmt: Format, places: Places) -> None:
        *batch, n, k = value.shape
        x, dtype = value.contiguous().resolve_neg(), value.dtype
        threads, described = torch.get_num_threads(), _described(fmt, n, k, dtype)
        code = call(described, x.data_ptr(), TYPES[dtype], math.prod(batch), n, k, places, threads, library.isa)
        library.check(code, f"quantize of {[*value.shape]} in {dtype} to {fmt.dtype}")

    def run(value: Tensor, text: str) -> list[Tensor]:
        fmt, (*batch, n, k) = parse_format(text), value.shape
        # in small pages, allocating many codes would take as long as computing them
        codes = large_pages.empty((*batch, n, packed_size(k, fmt.number.bits)), large_pages.KEPT + 1)
        parts = with_room(codes.view(fmt.number.storage), value, fmt)
        write(value, fmt, _places(parts[:3], parts.scale2))
        return to_list(parts)

    def into(value: Tensor, text: str, first: int, *parts: Tensor | None) -> bool:
        if not all(part is None or part.is_contiguous() for part in parts):
            return False
        fmt = parse_format(text)
        block = first // fmt.block[0]
        write(value, fmt, _places(parts, rows=(first, block, block)))
        return True

    register_kernel(Impl("quantize", "native", "cpu", run, refuses, priority=10, into=into))
