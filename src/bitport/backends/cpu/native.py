"""The native kernels: ``libbitport_kernels.so``, compiled when bitport is installed, called by ctypes.

Its source is ``native/kernels``, its interface ``bitport_kernels.h``. One library holds every variant; it chooses by
what the processor has, or ``BITPORT_CPU_ISA=scalar|avx2|avx512_bf16|amx_bf16`` chooses.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import torch
from torch import Tensor

from bitport.errors import KernelError
from bitport.numerics import NF4, decode
from bitport.ops import Weight

PATH = Path(__file__).with_name("libbitport_kernels.so")
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.uint8: 3}
ISAS = {"scalar": 0, "avx2": 1, "avx512_bf16": 2, "amx_bf16": 3}
BEST = -1


class Tiles4(ctypes.Structure):
    """BitportTiles4"""

    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("zero", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("scale_type", ctypes.c_int32),
        ("zero_type", ctypes.c_int32),
    )


class Library:
    """The loaded library. ``isa`` is the variant that runs, BEST for the library's own choice."""

    def __init__(self, path: Path, isa: str = "") -> None:
        self._lib = ctypes.CDLL(str(path))
        self._error, self._has = self._lib.bitport_error, self._lib.bitport_has_isa
        self._error.restype, self._error.argtypes = ctypes.c_char_p, [ctypes.c_int32]
        self._has.restype, self._has.argtypes = ctypes.c_int32, [ctypes.c_int32]
        pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        self._linear = self._lib.bitport_tiles4_linear
        self._linear.argtypes = [ctypes.POINTER(Tiles4), pointer, i32, i64, pointer, pointer, i32, i32]
        self.available = tuple(name for name, value in ISAS.items() if self._has(value))
        if isa and isa not in self.available:
            raise KernelError(f"BITPORT_CPU_ISA={isa}: this processor runs {', '.join(self.available)}")
        self.isa = ISAS[isa] if isa else BEST

    @property
    def isa_name(self) -> str:
        best = self._lib.bitport_best_isa()
        return next(name for name, value in ISAS.items() if value == (best if self.isa == BEST else self.isa))

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        """x [.., K] times one weight in cpu_tiles4, plus bias, in x's dtype."""
        n, k = weight.n, weight.k
        rows = x.reshape(-1, k).contiguous().resolve_neg() if x.numel() else x.new_empty(0, k)
        y = rows.new_empty(rows.shape[0], n)
        if y.numel():
            data, scale = weight.data.contiguous(), weight.scale.contiguous()
            zero = None if weight.zero is None else weight.zero.contiguous()
            bias = None if bias is None else bias.to(x.dtype).contiguous()
            tiles = Tiles4(
                data.data_ptr(),
                scale.data_ptr(),
                None if zero is None else zero.data_ptr(),
                ctypes.addressof(_table(weight.dtype)),
                n,
                k,
                weight.block_k,
                TYPES[scale.dtype],
                TYPES[torch.uint8 if zero is None else zero.dtype],
            )
            code = self._linear(
                tiles,
                rows.data_ptr(),
                TYPES[x.dtype],
                rows.shape[0],
                None if bias is None else bias.data_ptr(),
                y.data_ptr(),
                torch.get_num_threads(),
                self.isa,
            )
            if code:
                raise KernelError(f"native linear of {n}x{k} in {x.dtype}: {self._error(code).decode()}")
        return y.reshape(*x.shape[:-1], n)


@functools.cache
def _table(dtype: str) -> ctypes.Array[ctypes.c_float]:
    """What each of the 16 codes means."""
    if dtype == "nf4":
        return (ctypes.c_float * 16)(*NF4)
    codes = torch.arange(16, dtype=torch.uint8)
    return (ctypes.c_float * 16)(*(codes.float() - 8 if dtype == "int4" else decode(codes, dtype)).tolist())


def load() -> Library | str:
    """The library, or why there is none."""
    if not PATH.is_file():
        return "they were not compiled when bitport was installed"
    try:
        return Library(PATH, os.environ.get("BITPORT_CPU_ISA", ""))
    except OSError as error:
        return f"{PATH.name} does not load: {error}"
