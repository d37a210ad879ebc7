"""CPU: the native kernels, if they were compiled, and those of PyTorch's own ops that beat the generic kernel there."""

import sys
from collections.abc import Iterator

from bitport.backends.cpu import (
    attention,
    crossovers,
    dispatcher,
    int8pack_mm,
    int_mm,
    native,
    optimizer_step,
    quantize,
    tiles,
)
from bitport.checksum import compute_by
from bitport.layouts import register_layout
from bitport.layouts.cpu_tiles import CpuTiles
from bitport.ops import Impl, Missing, register_kernel, register_missing
from bitport.ops.optimizer_step import STEP

LIBRARY = native.load()
NO_PRODUCTS = (
    "no native products and attention: this processor has none of AVX2, AVX-512, AMX and NEON, and PyTorch's are "
    "faster than plain loops (which BITPORT_CPU_ISA=scalar asks for)"
)
PRODUCTS = (*dispatcher.OPS, "dequantize")
OPS = (*PRODUCTS, "quantize", STEP)
"""The ops with a kernel called native, if the library is there."""
COMPILER = (
    "pip install ziglang, set CXX=python -m ziglang c++"
    if sys.platform == "win32"
    else "install a C++ compiler (g++ or clang++)"
)
REMEDY = f"{COMPILER}, then in the folder of bitport's source: pip install --no-deps -e ."


def in_brief(reason: str) -> str:
    """The first line of ``reason``; what a compiler said may have hundreds."""
    first, _, more = reason.partition("\n")
    return f"{first} .. (bitport doctor shows all of it)" if more else first


register_kernel(Impl("linear", "int8pack_mm", "cpu", int8pack_mm.run, int8pack_mm.refuses))
register_kernel(Impl("dyn_linear", "int_mm", "cpu", int_mm.run, int_mm.refuses))
if isinstance(LIBRARY, native.Library):
    if LIBRARY.multiplies:
        tiles.register(LIBRARY)
        attention.register(LIBRARY)
        register_layout(CpuTiles(("cpu",), LIBRARY.pack, LIBRARY.unpack))
    else:
        register_missing(Missing("native", "cpu", PRODUCTS, NO_PRODUCTS, 10, curable=False))
    compute_by(LIBRARY.crc32)
    quantize.register(LIBRARY)
    optimizer_step.register(LIBRARY)
    NOT_AT_DISPATCHER = dispatcher.register(LIBRARY)
    if LIBRARY.multiplies:
        crossovers.load(LIBRARY)  # after the dispatcher has named the types that it limits
else:
    register_missing(Missing("native", "cpu", OPS, f"{in_brief(LIBRARY)}; {REMEDY}", 10))
    NOT_AT_DISPATCHER = LIBRARY


def tune() -> Iterator[str]:
    """Measure the choice between kernels for ``bitport tune``."""
    if not isinstance(LIBRARY, native.Library):
        yield f"nothing to choose between: no native kernels ({LIBRARY})"
        return
    if not LIBRARY.multiplies:
        yield f"nothing to choose between: {NO_PRODUCTS}"
        return
    found: dict[str, int | None] = {}
    for kind, most in crossovers.measure(LIBRARY):
        found[kind] = most
        yield f"linear {kind}: " + ("native for any number of rows" if most is None else f"native up to {most} rows")
    yield f"written to {crossovers.save(LIBRARY, found)}"


def describe() -> list[str]:
    """Describe the native kernels for ``bitport doctor``."""
    if isinstance(LIBRARY, native.Library):
        measured = (
            "as measured here by bitport tune" if crossovers.MOST_ROWS else "by default; bitport tune would measure it"
        )
        lines = [
            f"native kernels: {LIBRARY.isa_name} (this processor runs {', '.join(LIBRARY.available)})",
            f"choice between native and dense_mm: {measured}" if LIBRARY.multiplies else NO_PRODUCTS,
        ]
        if NOT_AT_DISPATCHER:
            lines.append(f"called through Python and on one thread: {NOT_AT_DISPATCHER}")
        return lines
    return [
        f"no native kernels: {LIBRARY}",
        "without them weights are dequantized on every call",
        REMEDY,
    ]
