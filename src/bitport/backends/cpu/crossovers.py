"""From how many rows on the native kernel of linear is slower than ``dense_mm`` on this machine: measured, and kept in
the user's cache folder.

dense_mm makes the weight dense and calls PyTorch's own product. Where that product is far better than the native one
(an instruction set that the native kernels do not use), it wins from some number of rows on. ``bitport tune`` measures
that number for each kind of weight; without a measurement the native kernel always runs.

The file, JSON, holds what it was measured with and, for each kind, the most rows for which the native kernel is at
least as fast (null: always)::

    {"version": 1, "machine": {"model": .., "cpu": .., "isa": .., "threads": 2, "torch": ..},
     "most_rows": {"int4/group": 512, ..}}

A file of another version or machine, or one that is damaged, is ignored with a warning.
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

from bitport.backends import measured
from bitport.backends.cpu.native import Library
from bitport.layouts import layout
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
"""How much faster dense_mm must be."""

CPUINFO = Path("/proc/cpuinfo")
NAMES = (
    *("model name", "vendor_id", "cpu family", "model", "stepping"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision"),
)

MOST_ROWS: dict[str, int | None] = {}
"""By kind; a kind that is not there was not measured."""


def kind(weight: Weight) -> str:
    """What the speed depends on beside the size: the number type, and whether scales are per row."""
    return _kind(weight.dtype, weight.block_k >= weight.k)


def _kind(dtype: str, whole_row: bool) -> str:
    return f"{dtype}/{'row' if whole_row else 'group'}"


def refuses(weight: Weight, rows: int) -> str | None:
    most = MOST_ROWS.get(kind(weight))
    return None if most is None or rows <= most else f"dense_mm was measured to be faster here from {most + 1} rows on"


@functools.cache
def model(cpuinfo: Path = CPUINFO) -> str:
    """The processor, by what Linux says of its first core; elsewhere what the system calls it. Virtual machines often
    give one name to processors whose numbers differ, and ARM gives numbers alone."""
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace") as lines:
            core = list(itertools.takewhile(str.strip, lines))  # a blank line ends it; all would take milliseconds
    except OSError:
        return platform.processor() or platform.machine()
    pairs = (line.partition(":") for line in core)
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    return " ".join(fields[name] for name in NAMES if fields.get(name)) or platform.machine()


def machine(library: Library) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "model": model(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "isa": library.isa_name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def path(library: Library) -> Path:
    """One file per machine, for folders that several share."""
    key = hashlib.sha256(json.dumps(machine(library), sort_keys=True).encode()).hexdigest()[:12]
    return measured.folder() / f"crossovers-{key}.json"


def load(library: Library) -> None:
    """Read the file for this machine, if there is one."""
    content = measured.read(path(library), lambda content: _fault(content, machine(library)))
    use(library, content["most_rows"] if content else {})


def _fault(content: Any, here: dict[str, Any]) -> str | None:
    """Why a file cannot be used."""
    if not isinstance(content, dict) or content.get("version") != VERSION:
        return f"it is not of version {VERSION}"
    if content.get("machine") != here:
        return f"it was measured with {content.get('machine')}, this is {here}"
    rows = content.get("most_rows")
    if not isinstance(rows, dict) or not all(
        most is None or (type(most) is int and most >= 0) for most in rows.values()
    ):
        return "most_rows must name a whole number of rows, or null, for each kind of weight"
    return None


def save(library: Library, most_rows: dict[str, int | None]) -> Path:
    """Write the file for this machine, whole or not at all, and use it."""
    file = path(library)
    measured.write(file, {"version": VERSION, "machine": machine(library), "most_rows": most_rows})
    use(library, most_rows)
    return file


def use(library: Library, most_rows: dict[str, int | None]) -> None:
    """Choose by these from now on, also where the kernel is called without Python."""
    MOST_ROWS.clear()
    MOST_ROWS.update(most_rows)
    for dtype in NUMBER_TYPES:
        for whole_row in (False, True):
            library.limit_rows(dtype, whole_row, MOST_ROWS.get(_kind(dtype, whole_row)))


def measure(library: Library, schemes: tuple[str, ...] = SCHEMES) -> Iterator[tuple[str, int | None]]:
    """(kind, most rows) for each scheme, one after the other."""
    for name in schemes:
        scheme = preset(name)
        dense = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)).bfloat16() * 0.02
        parts = quantize(dense, scheme.weight)
        plain = Weight(*parts, scheme.weight.dtype, SIZE, SIZE, *scheme.weight.block_shape(SIZE, SIZE), "plain")
        packed = layout(CpuTiles.name).pack(plain.matrix, parts)
        weight = plain._replace(**packed._asdict(), layout=CpuTiles.name)
        yield kind(weight), most_rows([_speedup(library, weight, rows) for rows in ROWS])


def most_rows(speedups: list[float]) -> int | None:
    """Up to how many of ROWS the native kernel runs, given how many times faster it is at each of them. Where both are
    about equal it runs: it needs no memory for a dense weight."""
    winning = [rows for rows, speedup in zip(ROWS, speedups, strict=True) if speedup * WORTH >= 1]
    return None if winning and winning[-1] == ROWS[-1] else winning[-1] if winning else 0


def _speedup(library: Library, weight: Weight, rows: int) -> float:
    """Time of dense_mm over that of the native kernel, measured in turn."""
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
