"""Measured crossovers between the native kernel of linear and ``dense_mm`` on this machine, kept in the user's cache
folder.

dense_mm dequantizes the weight and calls PyTorch's own product. Where that product is far faster than the native one
(it uses an instruction set that the native kernels do not), it wins from some number of rows on. ``bitport tune``
measures that number for each kind of weight; without a measurement the native kernel always runs.

The JSON file holds what it was measured with and, for each kind, the most rows for which the native kernel is at least
as fast (null: always)::

    {"version": 1, "machine": {"model": .., "cpu": .., "isa": .., "threads": 2, "torch": ..},
     "most_rows": {"int4/group": 512, ..}}

A file that is damaged, or of another version or machine, is ignored with a warning.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bitport.backends import measured, user_cache
from bitport.backends.cpu.native import Library
from bitport.layouts.cpu_tiles import CpuTiles
from bitport.numerics import NUMBER_TYPES, quantize
from bitport.ops import Weight
from bitport.schemes import preset

VERSION = 1
SCHEMES = (
    *("int2", "int3", "int4", "int4-channel", "int5", "int6", "int8", "int8-g128", "nf4"),
    *("fp8-wo", "fp8-e5m2-wo", "mxfp8-wo", "mxfp6-wo", "mxfp4-wo", "nvfp4-wo"),
)
ROWS = (1, 4, 16, 64, 256, 1024)
SIZE = 2048
"""N and K of the weights that are measured."""
WORTH = 1.1
"""How much faster dense_mm must be to be chosen."""

CPUINFO = Path("/proc/cpuinfo")
NAMES = (
    *("model name", "vendor_id", "cpu family", "model", "stepping"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision"),
)

MOST_ROWS: dict[str, int | None] = {}
"""Kind -> most rows for the native kernel; kinds that were not measured are missing."""


def refuses(weight: Weight, rows: int) -> str | None:
    most = MOST_ROWS.get(measured.kind(weight))
    return None if most is None or rows <= most else f"dense_mm was measured to be faster here from {most + 1} rows on"


@functools.cache
def model(cpuinfo: Path = CPUINFO) -> str:
    """Identify the processor by what Linux reports for its first core; elsewhere by the system's name for it. The model
    numbers matter: virtual machines often give different processors one name, and ARM reports only numbers."""
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace") as lines:
            core = list(itertools.takewhile(str.strip, lines))  # up to a blank line; all cores would take milliseconds
    except OSError:
        return platform.processor() or platform.machine()
    pairs = (line.partition(":") for line in core)
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    return " ".join(fields[name] for name in NAMES if fields.get(name)) or platform.machine()


def machine(library: Library) -> dict[str, Any]:
    """Return what the measurements depend on."""
    return {
        "model": model(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "isa": library.isa_name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def path(library: Library) -> Path:
    """Return the file of this machine; several machines may share the folder."""
    key = hashlib.sha256(json.dumps(machine(library), sort_keys=True).encode()).hexdigest()[:12]
    return user_cache.folder() / f"crossovers-{key}.json"


def load(library: Library) -> None:
    """Read and use the file of this machine, if there is one."""
    content = measured.read(path(library), lambda content: _fault(content, machine(library)))
    use(library, content["most_rows"] if content else {})


def _fault(content: Any, here: dict[str, Any]) -> str | None:
    """Return why a file cannot be used, or None."""
    if not isinstance(content, dict) or content.get("version") != VERSION:
        return f"it is not of version {VERSION}"
    if content.get("machine") != here:
        return f"it was measured with {content.get('machine')}, this is {here}"
    rows = content.get("most_rows")
    if not isinstance(rows, dict) or not all(
        most is None or (type(most) is int and 0 <= most < 1 << 63) for most in rows.values()
    ):
        return "most_rows must name a whole number of rows, or null, for each kind of weight"
    return None


def save(library: Library, most_rows: dict[str, int | None]) -> Path:
    """Write the file of this machine, atomically, and use it."""
    file = path(library)
    measured.write(file, {"version": VERSION, "machine": machine(library), "most_rows": most_rows})
    use(library, most_rows)
    return file


def use(library: Library, most_rows: dict[str, int | None]) -> None:
    """Choose by these limits from now on, also where the kernel is called without Python."""
    MOST_ROWS.clear()
    MOST_ROWS.update(most_rows)
    for dtype in NUMBER_TYPES:
        for whole_row in (False, True):
            library.limit_rows(dtype, whole_row, MOST_ROWS.get(measured.kind_of(dtype, whole_row)))


def measure(library: Library, schemes: tuple[str, ...] = SCHEMES) -> Iterator[tuple[str, int | None]]:
    """Measure each scheme in turn and yield (kind, most rows)."""
    measured.check_kept()
    for name in schemes:
        scheme = preset(name)
        dense = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)).bfloat16() * 0.02
        weight = Weight.of(quantize(dense, scheme.weight), scheme.weight, SIZE, SIZE).to_layout(CpuTiles.name)
        yield measured.kind(weight), most_rows([_speedup(library, weight, rows) for rows in ROWS])


def most_rows(speedups: list[float]) -> int | None:
    """Return the largest of ROWS up to which the native kernel runs, given its speedup over dense_mm at each of them.
    It also runs if both are about equal: it needs no memory for a dense weight."""
    winning = [rows for rows, speedup in zip(ROWS, speedups, strict=True) if speedup * WORTH >= 1]
    return None if winning and winning[-1] == ROWS[-1] else winning[-1] if winning else 0


def _speedup(library: Library, weight: Weight, rows: int) -> float:
    """Return the time of dense_mm over that of the native kernel, measured alternately."""
    x = torch.randn(rows, weight.k, generator=torch.Generator().manual_seed(rows)).bfloat16()

    def native() -> Tensor:
        return library.linear(x, weight, None)

    def dense_mm() -> Tensor:
        return F.linear(x, library.dense(weight, x.dtype))

    return statistics.median(_time(dense_mm) / _time(native) for _ in range(5))


def _time(run: Callable[[], Tensor]) -> float:
    with torch.inference_mode():
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
