"""The native kernels: ``libbitport_kernels.so``, compiled when bitport is installed and called through ctypes.

Its source is ``native/kernels``, its interface ``bitport_kernels.h``. One library contains all variants and picks one
by the processor's features, unless ``BITPORT_CPU_ISA`` names one of ISAS. The same library registers its kernels with
PyTorch (``native/torch``), which then calls them without Python; see :mod:`bitport.backends.cpu.dispatcher`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitport.backends.sources import fingerprint
from bitport.errors import KernelError
from bitport.layouts import Matrix, large_pages
from bitport.layouts.cpu_tiles import pack_tiles, unpack_tiles
from bitport.numerics import NUMBER_TYPES, packed_size
from bitport.ops import Weight
from bitport.ops.native_codes import ACTS, THEN, meanings

PATH = Path(__file__).with_name("libbitport_kernels.so")
SOURCES = PATH.parent / "../../../../native"
"""The sources, in an editable installation."""
TYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.uint8: 3,
    torch.float8_e8m0fnu: 4,
    torch.float8_e4m3fn: 5,
}
X86 = {"avx2": 1, "avx512_vnni": 2, "avx512_bf16": 3, "amx": 4}
ARM = {"neon": 5, "neon_dot": 6, "neon_matrix": 7}
ISAS = {"scalar": 0, **(ARM if platform.machine() in ("aarch64", "arm64") else X86)}
"""Variants for this architecture; each includes the ones before it."""
BEST = -1


class Tiles(ctypes.Structure):
    """BitportTiles"""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scale", "zero", "scale2", "table")),
        *((name, ctypes.c_int64) for name in ("n", "k", "group")),
        *((name, ctypes.c_int32) for name in ("bits", "integer", "scale_type", "zero_type")),
    )


class Functions(ctypes.CDLL):
    """A shared library whose missing functions raise KernelError: it was compiled from another version of bitport."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise KernelError(
                f"{self._name} has no {name}: it was compiled from another version of bitport; reinstall"
            ) from error


class Library:
    """The loaded library. ``isa`` is the variant that runs, or BEST for the library's own choice."""

    def __init__(self, path: Path, isa: str = "") -> None:
        pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        tiles = ctypes.POINTER(Tiles)
        lib = self.functions = Functions(str(path))
        self._error = typed(lib.bitport_error, [i32], ctypes.c_char_p)
        self._has = typed(lib.bitport_has_isa, [i32], i32)
        self._best = typed(lib.bitport_best_isa, [], i32)
        self._linear = typed(
            lib.bitport_dyn_linear,
            [tiles, pointer, i32, i64, i32, pointer, pointer, i32, pointer, pointer, i32, i32],
            i32,
        )
        self._rows = typed(lib.bitport_rows, [tiles, pointer, i64, pointer, i32, i32], i32)
        self._distance = typed(lib.bitport_distance, [tiles, pointer, i32, pointer, i32], i32)
        self._pack = typed(lib.bitport_pack, [pointer, i32, i64, i64, pointer, i32], i32)
        self._crc32 = typed(lib.bitport_crc32, [pointer, i64, ctypes.c_uint32], ctypes.c_uint32)
        self._unpack = typed(lib.bitport_unpack, [pointer, i32, i64, i64, pointer, i32], i32)
        self.available = tuple(name for name, value in ISAS.items() if self._has(value))
        if isa and isa not in self.available:
            raise KernelError(f"BITPORT_CPU_ISA={isa}: this processor runs {', '.join(self.available)}")
        self._isa = ISAS[isa] if isa else BEST

    @property
    def isa(self) -> int:
        return self._isa

    @isa.setter
    def isa(self, isa: int) -> None:
        self._isa = isa
        self.functions.bitport_torch_isa(isa)

    @property
    def multiplies(self) -> bool:
        """Whether to use the library for products and attention: if a vector variant is available, or the scalar one
        was requested by name. The scalar loops are the reference, and for many rows several times slower than the
        generic kernel."""
        return self.available != ("scalar",) or self.isa != BEST

    @property
    def isa_name(self) -> str:
        running = self._best() if self.isa == BEST else self.isa
        return next(name for name, value in ISAS.items() if value == running)

    def limit_rows(self, dtype: str, whole_row: bool, most: int | None) -> None:
        """Set the most rows of x that linear's kernel at PyTorch's dispatcher takes, for weights of this kind."""
        self.functions.bitport_limit_rows(dtype.encode(), whole_row, ctypes.c_int64(-1 if most is None else most))

    def linear(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        act: str = "",
        act_scale: Tensor | None = None,
        then: str = "",
        times: Tensor | None = None,
    ) -> Tensor:
        """Round x [.., K] to ``act`` (of ACTS), multiply by one weight in cpu_tiles and add the bias; apply ``then``
        (of THEN) and multiply by ``times``. The result has x's dtype."""
        n, k = weight.n, weight.k
        rows = x.reshape(-1, k).contiguous().resolve_neg() if x.numel() else x.new_empty(0, k)
        y = rows.new_empty(rows.shape[0], n)
        if y.numel():
            bias = None if bias is None else bias.to(x.dtype).contiguous().resolve_neg()
            times = None if times is None else times.contiguous().resolve_neg()
            tiles, kept = _tiles(weight)
            code = self._linear(
                tiles,
                rows.data_ptr(),
                TYPES[x.dtype],
                rows.shape[0],
                ACTS[act],
                address(act_scale),
                address(bias),
                THEN[then],
                address(times),
                y.data_ptr(),
                torch.get_num_threads(),
                self.isa,
            )
            self.check(code, f"linear of {n}x{k} in {x.dtype}")
            del kept
        return y.reshape(*x.shape[:-1], n)

    def rows(self, ids: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
        """Return the rows ``ids`` of one weight in cpu_tiles, [.., K]."""
        flat = ids.reshape(-1).long().contiguous()
        y = flat.new_empty(flat.numel(), weight.k, dtype=dtype)
        tiles, kept = _tiles(weight)
        code = self._rows(tiles, flat.data_ptr(), flat.numel(), y.data_ptr(), TYPES[dtype], torch.get_num_threads())
        if code and len(outside := flat[(flat < 0) | (flat >= weight.n)]):
            raise IndexError(f"ids are rows 0 to {weight.n - 1} of the table, not {int(outside[0])}")
        self.check(code, f"lookup in {weight.n}x{weight.k}")
        del kept
        return y.reshape(*ids.shape, weight.k)

    def dense(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        """Dequantize one weight in cpu_tiles to [N, K]."""
        return self.rows(torch.arange(weight.n, device="cpu"), weight, dtype)

    def distance(self, value: Tensor, weight: Weight) -> Tensor:
        """Return |value|^2 and |value - weight|^2 for one weight [N, K] in cpu_tiles, in float64."""
        x, sums = value.detach().contiguous().resolve_neg(), torch.empty(2, dtype=torch.float64, device="cpu")
        tiles, kept = _tiles(weight)
        code = self._distance(tiles, x.data_ptr(), TYPES[x.dtype], sums.data_ptr(), torch.get_num_threads())
        self.check(code, f"distance from {weight.n}x{weight.k} in {x.dtype}")
        del kept
        return sums

    def pack(self, matrix: Matrix, data: Tensor) -> Tensor:
        """Pack canonical data [.., N, bytes] into tiles."""
        if not _is_real(data):
            return pack_tiles(matrix, data)
        dense, bits = data.contiguous(), NUMBER_TYPES[matrix.dtype].bits
        tiles = large_pages.empty([*data.shape[:-2], -(-matrix.n // 32), -(-matrix.k // 32), 128 * bits])
        self._each(self._pack, matrix, dense, tiles, dense.shape[:-2])
        return tiles

    def unpack(self, matrix: Matrix, tiles: Tensor) -> Tensor:
        if not _is_real(tiles):
            return unpack_tiles(matrix, tiles)
        number = NUMBER_TYPES[matrix.dtype]
        size = packed_size(matrix.k, number.bits)
        data = tiles.new_empty(*tiles.shape[:-3], matrix.n, size)
        self._each(self._unpack, matrix, tiles.contiguous(), data, tiles.shape[:-3])
        return data.view(number.storage)

    def _each(self, move: Any, matrix: Matrix, source: Tensor, target: Tensor, batch: torch.Size) -> None:
        """Pack or unpack every matrix of a batch."""
        bits, count = NUMBER_TYPES[matrix.dtype].bits, batch.numel()
        sizes = [part.numel() // max(count, 1) for part in (source, target)]
        for i in range(count):
            start, to = source.data_ptr() + i * sizes[0], target.data_ptr() + i * sizes[1]
            self.check(move(start, bits, matrix.n, matrix.k, to, torch.get_num_threads()), f"packing of {matrix}")

    def crc32(self, data: bytes | memoryview, before: int) -> int:
        array = np.frombuffer(data, np.uint8)
        return int(self._crc32(array.ctypes.data, array.nbytes, before))

    def check(self, code: int, what: str) -> None:
        if code:
            raise KernelError(f"native {what}: {self._error(code).decode()}")


def _is_real(part: Tensor) -> bool:
    """Whether ``part`` has memory that may be accessed directly: not while a program is traced or transformed."""
    watched = torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None
    return type(part) is Tensor and not watched


def typed(function: Any, arguments: list[Any], result: Any) -> Any:
    """Return a function of the library, told its types."""
    function.argtypes, function.restype = arguments, result
    return function


def address(part: Tensor | None) -> int | None:
    """Return the address of its data; None for None."""
    return None if part is None else part.data_ptr()


def _tiles(weight: Weight) -> tuple[Tiles, list[Tensor | None]]:
    """Return the struct and the tensors that it points into."""
    kept = [None if part is None else part.contiguous() for part in weight[:4]]
    number = NUMBER_TYPES[weight.dtype]
    tiles = Tiles(
        *map(address, kept),
        ctypes.addressof(table_of(weight.dtype)),
        weight.n,
        weight.k,
        weight.block_k,
        number.bits,
        number.kind == "int",
        TYPES[weight.scale.dtype],
        TYPES[torch.uint8 if weight.zero is None else weight.zero.dtype],
    )
    return tiles, kept


@functools.cache
def table_of(dtype: str) -> ctypes.Array[ctypes.c_float]:
    """Return the value of each code."""
    values = meanings(dtype)
    return (ctypes.c_float * len(values))(*values)


def load() -> Library | str:
    """Load the library; return it, or the reason why there is none."""
    if not PATH.is_file():
        reason = PATH.with_suffix(".txt")
        said = f": {reason.read_text(encoding='utf-8').strip()}" if reason.is_file() else ""
        return f"not compiled when bitport was installed{said}"
    try:
        library = Library(PATH, os.environ.get("BITPORT_CPU_ISA", ""))
    except OSError as error:
        return f"{PATH.name} does not load: {error}"
    check_sources(typed(library.functions.bitport_sources, [], ctypes.c_char_p)().decode(), SOURCES)
    return library


def check_sources(compiled: str, sources: Path) -> None:
    """Raise KernelError if the sources at hand are not the ones that were compiled. A library that was not built by
    ``setup.py`` has no fingerprint and cannot be checked."""
    if compiled and (sources / "kernels" / "bitport_kernels.h").is_file() and compiled != fingerprint(sources):
        raise KernelError(
            f"{PATH.name} was compiled from other sources than those in {sources.resolve()}: run pip install --no-deps "
            "-e . in the folder above them again, or do without (BITPORT_DISABLE=cpu)"
        )
