"""Measures, on the device at hand, which blocks and which kernel are the fastest for how many rows."""

from __future__ import annotations

import copy
import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
import triton
from torch import Tensor

from bitport.backends import measured
from bitport.backends.accelerator import Accelerator
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
Sizes: TypeAlias = dict[str, tuple[int, ...]]
PROGRAMS = (128, 256, 512, 1024)
GEMV: Sizes = {"BN": (4, 8, 16, 32), "BK": (256, 512, 1024), "num_warps": (2, 4), "num_stages": (2, 3, 4)}
TILES: dict[int | None, Sizes] = {
    16: {"BM": (16,), "BN": (32, 64, 128), "BK": (64, 128), "num_warps": (2, 4), "num_stages": (3, 4)},
    32: {"BM": (32,), "BN": (64, 128), "BK": (64, 128), "num_warps": (4,), "num_stages": (3, 4)},
    64: {"BM": (64,), "BN": (64, 128), "BK": (64, 128), "num_warps": (4, 8), "num_stages": (3, 4)},
    None: {"BM": (64, 128), "BN": (64, 128), "BK": (32, 64), "num_warps": (4, 8), "num_stages": (3, 4)},
}
"""What is tried, tiles by rows (None: any number), and each with every one of PROGRAMS."""
MOST_GEMV = 16
PLAYS = 7
REFERENCE = "int4"
"""The scheme by which blocks are chosen."""


def tune(device: torch.device) -> Iterator[str]:
    """Lines that say what was found; the table is kept for later processes."""
    name = configs.architecture(device)
    content = copy.deepcopy(configs.of(device).content)
    about = Accelerator(device).about()["device"]
    content["source"] = f"measured on {about} with torch {torch.__version__}, triton {triton.__version__}"
    content["gemv"], seconds = _best("gemv", 1, GEMV, content, device)
    yield f"gemv: {content['gemv']}, {seconds * 1e6:.1f} us"
    blocks: list[dict[str, Any]] = []
    for most, sizes in TILES.items():
        best, seconds = _best("tiles", most or ROWS[-1], sizes, content, device)
        blocks.append({"rows": most, **best})
        yield f"tiles of {most or 'any number of'} rows: {best}, {seconds * 1e6:.1f} us"
    content["tiles"] = blocks
    content["most_rows"] = {"gemv": {"*": 0}, "tiles": {"*": 0}}
    for scheme in SCHEMES:
        kind, gemv, tiles = _crossovers(scheme, Config(content), device)
        for kernel, most in (("gemv", gemv), ("tiles", tiles)):
            content["most_rows"][kernel][kind] = most
        yield f"linear {kind}: gemv up to {gemv} rows, tiles up to {tiles}, then a dense product"
    for kinds in content["most_rows"].values():
        kinds["*"] = int(statistics.median(most for kind, most in kinds.items() if kind != "*"))
    measured.write(configs.path(name), content)
    configs.of.cache_clear()
    yield f"written to {configs.path(name)}"


def _best(
    kernel: str, rows: int, sizes: Sizes, content: dict[str, Any], device: torch.device
) -> tuple[dict[str, int], float]:
    weights = _weights(REFERENCE, device)
    x, run = linear.prepared(_rows(rows, device), "", None), linear.gemv if kernel == "gemv" else linear.tiles
    found: list[tuple[float, dict[str, int]]] = []
    for values in itertools.product(*sizes.values(), PROGRAMS):
        blocks: dict[str, Any] = dict(zip((*sizes, "programs"), values, strict=True))
        trial = blocks if kernel == "gemv" else [{"rows": None, **blocks}]
        config = Config({**content, kernel: trial})
        try:
            taken = _time(lambda weight: run(x, weight, None, torch.bfloat16, config), weights)  # noqa: B023
        except triton.runtime.errors.OutOfResources:
            taken = math.inf  # more shared memory or registers than the device has
        found.append((taken, blocks))
    seconds, best = min(found, key=lambda each: each[0])
    return best, seconds


def _crossovers(scheme: str, config: Config, device: torch.device) -> tuple[str, int, int]:
    """(kind of weight, most rows for gemv, most rows for tiles)"""
    weights = _weights(scheme, device)
    gemv = tiles = 0
    for rows in ROWS:
        x = _rows(rows, device)
        held = linear.prepared(x, "", None)
        by_gemv = math.inf
        by_tiles = _time(lambda weight: linear.tiles(held, weight, None, x.dtype, config), weights)  # noqa: B023
        if rows <= MOST_GEMV:
            by_gemv = _time(lambda weight: linear.gemv(held, weight, None, x.dtype, config), weights)  # noqa: B023
        dense = _time(lambda weight: kernels.dense_mm(x, *weight, None), weights)  # noqa: B023
        gemv = rows if by_gemv <= min(by_tiles, dense) * WORTH else gemv
        tiles = rows if min(by_gemv, by_tiles) <= dense * WORTH else tiles
    return configs.kind(weights[0]), gemv, tiles


def _weights(scheme: str, device: torch.device) -> list[Weight]:
    """As many copies of one weight as fill the cache twice, so that each comes from memory when it is its turn."""
    chosen = preset(scheme)
    value = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16) * 0.02
    parts = quantize(value, chosen.weight)
    one = Weight(*parts, chosen.weight.dtype, SIZE, SIZE, *chosen.weight.block_shape(SIZE, SIZE), "plain")
    copies = -(-2 * Accelerator(device).cache // one.data.nbytes)
    return [one, *(one._replace(data=one.data.clone()) for _ in range(copies - 1))]


def _rows(rows: int, device: torch.device) -> Tensor:
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(rows)).to(device, torch.bfloat16)


def _time(run: Callable[[Weight], object], weights: list[Weight]) -> float:
    """Seconds of the device for one call, the median of plays of a graph that calls with each weight in turn: neither
    the launch nor a weight left in the cache is measured."""
    gpu = Accelerator(weights[0].data.device)
    play, _ = gpu.recorded(lambda: [run(weight) for weight in weights])
    return statistics.median(gpu.seconds(play) for _ in range(PLAYS)) / len(weights)
