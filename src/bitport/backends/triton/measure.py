"""Measures, on the device at hand, which blocks and which kernel are the fastest for how many rows."""

from __future__ import annotations

import copy
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from torch import Tensor

from bitport.backends import measured
from bitport.backends.triton import configs, kernels, linear
from bitport.backends.triton.configs import Config
from bitport.numerics import quantize
from bitport.ops import Weight
from bitport.schemes import preset

SCHEMES = (
    *("int2", "int3", "int4", "int4-channel", "int5", "int6", "int8", "int8-g128", "nf4"),
    *("fp8-wo", "fp8-e5m2-wo", "mxfp8-wo", "mxfp6-wo", "mxfp4-wo", "nvfp4-wo"),
)
SIZE = 4096
"""N and K of the weights that are measured."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
WORTH = 1.02
"""How much faster the next kernel must be: timings of one thing differ by as much."""
CANDIDATES: dict[str, dict[str, tuple[int, ...]]] = {
    "gemv": {"BN": (4, 8, 16), "BK": (256, 512, 1024), "num_warps": (2, 4), "num_stages": (2, 4)},
    "16": {"BM": (16,), "BN": (32, 64, 128), "BK": (64, 128), "num_warps": (2, 4), "num_stages": (3, 4)},
    "32": {"BM": (32,), "BN": (64, 128), "BK": (64, 128), "num_warps": (4,), "num_stages": (3, 4)},
    "64": {"BM": (64,), "BN": (64, 128), "BK": (64, 128), "num_warps": (4, 8), "num_stages": (3, 4)},
    "": {"BM": (64, 128), "BN": (64, 128), "BK": (32, 64), "num_warps": (4, 8), "num_stages": (3, 4)},
}
"""What is tried: for gemv, and for tiles by their rows ("" for any number)."""
REFERENCE = "int4"
"""The scheme by which blocks are chosen."""


def tune(device: torch.device) -> Iterator[str]:
    """Lines that say what was found; the table is kept for later processes."""
    name = configs.architecture(device)
    content = copy.deepcopy(configs.of(device).content)
    content["tiles"] = []
    for which in CANDIDATES:
        best, seconds = _best(which, content, device)
        named = which if which == "gemv" else f"tiles of {which or 'any number of'} rows"
        yield f"{named}: {best}, {seconds * 1e6:.1f} us"
        if which == "gemv":
            content["gemv"] = best
        else:
            content["tiles"].append({"rows": int(which) if which else None, **best})
    content["most_rows"] = {"gemv": {"*": 0}, "tiles": {"*": 0}}
    for scheme in SCHEMES:
        weight = _weight(scheme, device)
        gemv, tiles = _crossovers(weight, Config(content), device)
        for kernel, most in (("gemv", gemv), ("tiles", tiles)):
            content["most_rows"][kernel][configs.kind(weight)] = most
        yield f"linear {configs.kind(weight)}: gemv up to {gemv} rows, tiles up to {tiles}, then a dense product"
    for kinds in content["most_rows"].values():
        kinds["*"] = int(statistics.median(most for kind, most in kinds.items() if kind != "*"))
    measured.write(configs.path(name), content)
    configs.of.cache_clear()
    yield f"written to {configs.path(name)}"


def _best(which: str, content: dict[str, Any], device: torch.device) -> tuple[dict[str, int], float]:
    weight, rows = _weight(REFERENCE, device), 1 if which == "gemv" else int(which or ROWS[-1])
    x = linear.prepared(_rows(rows, device), "", None)
    found: dict[tuple[int, ...], float] = {}
    names = tuple(CANDIDATES[which])
    for sizes in itertools.product(*CANDIDATES[which].values()):
        blocks: dict[str, Any] = dict(zip(names, sizes, strict=True))
        trial = {**content, "gemv": blocks} if which == "gemv" else {**content, "tiles": [{"rows": None, **blocks}]}
        kernel = linear.gemv if which == "gemv" else linear.tiles
        try:
            found[sizes] = _time(lambda: kernel(x, weight, None, torch.bfloat16, Config(trial)))  # noqa: B023
        except triton.runtime.errors.OutOfResources:
            found[sizes] = math.inf  # more shared memory or registers than the device has
    best = min(found, key=lambda sizes: found[sizes])
    return dict(zip(names, best, strict=True)), found[best]


def _crossovers(weight: Weight, config: Config, device: torch.device) -> tuple[int, int]:
    """(most rows for gemv, most rows for tiles)"""
    gemv = tiles = 0
    for rows in ROWS:
        x = _rows(rows, device)
        held = linear.prepared(x, "", None)
        by_tiles = _time(lambda: linear.tiles(held, weight, None, x.dtype, config))  # noqa: B023
        by_gemv = _time(lambda: linear.gemv(held, weight, None, x.dtype, config)) if rows <= 16 else math.inf  # noqa: B023
        dense = _time(lambda: kernels.dense_mm(x, *weight, None))  # noqa: B023
        gemv = rows if by_gemv <= min(by_tiles, dense) * WORTH else gemv
        tiles = rows if min(by_gemv, by_tiles) <= dense * WORTH else tiles
    return gemv, tiles


def _weight(scheme: str, device: torch.device) -> Weight:
    chosen = preset(scheme)
    value = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16) * 0.02
    parts = quantize(value, chosen.weight)
    return Weight(*parts, chosen.weight.dtype, SIZE, SIZE, *chosen.weight.block_shape(SIZE, SIZE), "plain")


def _rows(rows: int, device: torch.device) -> Tensor:
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(rows)).to(device, torch.bfloat16)


def _time(run: Callable[[], object], calls: int = 20) -> float:
    """Seconds of one call, the median of 5 times ``calls`` in a row; the first compiles."""
    run()
    torch.accelerator.synchronize()
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        torch.accelerator.synchronize()
        taken.append((time.perf_counter() - start) / calls)
    return statistics.median(taken)
