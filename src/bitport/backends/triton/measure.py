"""Measures, on the device at hand, which blocks and which kernel are the fastest for how many rows.

In stages, each of which leaves its part of the table in the user's cache folder: a run that was stopped goes on where
it was, if device and versions are the same. Blocks are searched size by size, from those of the table in use: every
value of one with the others kept, until no change is worth it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch
import triton
from torch import Tensor

from bitport import layouts
from bitport.backends import measured
from bitport.backends.accelerator import Accelerator
from bitport.backends.aten import LEAST_ROWS
from bitport.backends.triton import configs, kernels, linear, scaled
from bitport.backends.triton.configs import Config
from bitport.numerics import Quantized, quantize
from bitport.ops import IMPLS, Weight
from bitport.schemes import preset

SCHEMES = (
    *("int4", "int8", "nf4", "mxfp4-wo", "int3", "fp8-wo", "nvfp4-wo", "int4-channel", "int8-g128"),
    *("int2", "int5", "int6", "fp8-e5m2-wo", "mxfp8-wo", "mxfp6-wo"),
)
"""Those asked for most come first."""
RIVALS = {
    "int_mm": ("dyn_linear", "int8-dyn"),
    "scaled_mm": ("dyn_linear", "fp8-row"),
    "scaled_mm_blocks": ("dyn_linear", "fp8-block"),
    "scaled_mm_mx": ("dyn_linear", "mxfp8"),
    "int4pack_mm": ("linear", "int4"),
    "int8pack_mm": ("linear", "int8"),
    "grouped_mm": ("grouped_linear", "int4"),
}
"""PyTorch's kernels that are asked before those here -> the op, and a scheme that they take."""
EXPERTS = 8
"""Of a grouped product, each with as many rows as a single weight."""
SIZE = 4096
"""N and K of the weights that are measured."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
WORTH = 1.02
"""How much faster the next kernel must be: timings of one thing differ by as much."""
Sizes: TypeAlias = dict[str, tuple[int, ...]]
PROGRAMS = (128, 256, 512, 1024)
GEMV: Sizes = {"BN": (4, 8, 16, 32), "BK": (256, 512, 1024), "num_warps": (2, 4), "num_stages": (2, 3, 4)}
TILES: dict[int | None, Sizes] = {
    8: {"BM": (8, 16), "BN": (64, 128), "BK": (128,), "num_warps": (4,), "num_stages": (3, 4)},
    16: {"BM": (16,), "BN": (32, 64, 128), "BK": (64, 128), "num_warps": (2, 4), "num_stages": (3, 4)},
    32: {"BM": (32,), "BN": (64, 128), "BK": (64, 128), "num_warps": (4,), "num_stages": (3, 4)},
    64: {"BM": (64,), "BN": (64, 128), "BK": (64, 128), "num_warps": (4, 8), "num_stages": (3, 4)},
    None: {"BM": (64, 128), "BN": (64, 128), "BK": (32, 64), "num_warps": (4, 8), "num_stages": (3, 4)},
}
SCALED: Sizes = {"BM": (128,), "BN": (64, 128, 256), "BK": (128, 256), "num_warps": (4, 8), "num_stages": (2, 3, 4)}
"""What is tried, tiles by rows (None: any number), and each with every one of PROGRAMS."""
MOST_GEMV = 16
PLAYS = 7
REFERENCE = "int4"
"""The scheme by which blocks are chosen."""
Note: TypeAlias = Callable[[dict[str, Any]], None]
"""What each trial is told to: stage, rows, blocks or kernel, and microseconds, None where it could not run."""


def tune(device: torch.device, note: Note = lambda trial: None) -> Iterator[str]:
    """Lines that say what was found, as it is kept for later processes. Of PyTorch's kernels those are measured that
    were loaded."""
    file, content = configs.path(configs.architecture(device)), begun(device)
    while content["unmeasured"]:
        stage = content["unmeasured"][0]
        try:
            found = measure(stage, content, device, functools.partial(_of_stage, stage, note))
        except RuntimeError:  # as after a bad access to memory: called again, the others come first
            content["unmeasured"].append(content["unmeasured"].pop(0))
            _keep(file, content)
            raise
        content["unmeasured"].remove(stage)
        _keep(file, content)
        yield found
    del content["unmeasured"]
    for kinds in content["most_rows"].values():
        kinds["*"] = int(statistics.median(most for kind, most in kinds.items() if kind != "*"))
    _keep(file, content)
    yield f"written to {file}"


def _of_stage(stage: str, note: Note, trial: dict[str, Any]) -> None:
    note({"stage": stage, **trial})


def _keep(file: Path, content: dict[str, Any]) -> None:
    measured.write(file, content)
    configs.of.cache_clear()


def source(device: torch.device) -> str:
    about = Accelerator(device).about()["device"]
    return f"measured on {about} with torch {torch.__version__}, triton {triton.__version__}"


def begun(device: torch.device) -> dict[str, Any]:
    """The table as far as it was measured here, with what is left to do."""
    content = copy.deepcopy(configs.of(device).content)
    if content["source"] == source(device) and content.get("unmeasured"):
        return content
    stages = ["gemv", *(f"tiles {rows or 'any'}" for rows in TILES), *(f"rows {scheme}" for scheme in SCHEMES)]
    stages += ["scaled"] if configs.of(device).scaled else []
    stages += [f"from {name}" for name in RIVALS if _rival(name, device)]
    tiles = [{**_nearest(content["tiles"], rows), "rows": rows} for rows in TILES]
    most = {kernel: {"*": kinds["*"]} for kernel, kinds in content["most_rows"].items()}
    return {**content, "source": source(device), "tiles": tiles, "most_rows": most, "unmeasured": stages}


def _nearest(tiles: list[dict[str, Any]], rows: int | None) -> dict[str, Any]:
    return next(each for each in tiles if each["rows"] is None or (rows is not None and rows <= each["rows"]))


def _rival(name: str, device: torch.device) -> Any:
    """The kernel of PyTorch's of that name, if it is one that the table speaks of and this device has."""
    op, scheme = RIVALS[name]
    impl = next((each for each in IMPLS.get((op, device.type), []) if each.name == name), None)
    if impl is None:
        return None
    args = _arguments(op, scheme, 1, _weights(scheme, device, 256, 1, "", op == "grouped_linear")[0])
    with _no_table(device):
        return impl if impl.supports(*args) is None else None


@contextlib.contextmanager
def _no_table(device: torch.device) -> Iterator[None]:
    """What the table in use says of a kernel is no reason to leave it out."""
    known = LEAST_ROWS.pop(device.type, None)
    try:
        yield
    finally:
        if known:
            LEAST_ROWS[device.type] = known


def measure(stage: str, content: dict[str, Any], device: torch.device, note: Note) -> str:
    """Puts what it finds into ``content``."""
    what, _, which = stage.partition(" ")
    if what == "rows":
        return _crossovers(which, content, device, note)
    if what == "from":
        return _least_rows(which, content, device, note)
    rows = 1 if stage == "gemv" else ROWS[-1] if which in ("any", "") else int(which)
    if what == "tiles":
        begin = next(each for each in content["tiles"] if each["rows"] == (None if which == "any" else rows))
        sizes = TILES[begin["rows"]]
    else:
        sizes, begin = (GEMV, content["gemv"]) if what == "gemv" else (SCALED, content["scaled"][-1])
    scheme = configs.of(device).scaled[0] if stage == "scaled" else REFERENCE
    weights, x = _weights(scheme, device), _rows(rows, device)

    def trial(blocks: dict[str, Any]) -> float:
        whole = {**begin, **blocks}
        single = whole if stage == "gemv" else [{**whole, "rows": None}]
        config = _config({**content, what: single}, device)

        def run(weight: Weight) -> Tensor:
            return _product(what, x, weight, scheme, config)

        return _time(run, weights, device, note, rows=rows, blocks=blocks)

    blocks, seconds = search({**sizes, "programs": PROGRAMS}, begin, trial)
    begin.update(blocks)
    return f"{stage}: {blocks}, {seconds * 1e6:.1f} us"


def _config(content: dict[str, Any], device: torch.device) -> Config:
    return configs.for_architecture(content, configs.architecture(device))


def _product(what: str, x: Tensor, weight: Weight, scheme: str, config: Config) -> Tensor:
    if what == "scaled":
        return scaled.product(x, scheme, None, weight, None, config)
    return (linear.gemv if what == "gemv" else linear.tiles)(
        linear.prepared(x, "", None), weight, None, x.dtype, config
    )


def search(
    sizes: Sizes, begin: dict[str, Any], time: Callable[[dict[str, Any]], float]
) -> tuple[dict[str, Any], float]:
    """(the best, its seconds)"""
    best = {name: begin[name] for name in sizes}
    known = {tuple(best.values()): time(best)}
    seconds, better = known[tuple(best.values())], True
    while better:
        better = False
        for name, values in sizes.items():
            for value in values:
                trial = {**best, name: value}
                if tuple(trial.values()) in known:
                    continue
                known[tuple(trial.values())] = taken = time(trial)
                if taken * WORTH < seconds:
                    best, seconds, better = trial, taken, True
    return best, seconds


def _crossovers(scheme: str, content: dict[str, Any], device: torch.device, note: Note) -> str:
    """The most rows for gemv, and for tiles, before a dense product is faster."""
    weights, config = _weights(scheme, device), _config(content, device)
    gemv = tiles = 0
    for rows in ROWS:
        x = _rows(rows, device)

        def time(kernel: str, run: Callable[[Weight], object], rows: int = rows) -> float:
            return _time(run, weights, device, note, rows=rows, kernel=kernel)

        by_tiles = time("tiles", lambda weight: _product("tiles", x, weight, scheme, config))  # noqa: B023
        by_gemv = math.inf
        if rows <= MOST_GEMV:
            by_gemv = time("gemv", lambda weight: _product("gemv", x, weight, scheme, config))  # noqa: B023
        dense = time("dense", lambda weight: kernels.dense_mm(x, *weight, None))  # noqa: B023
        gemv = rows if by_gemv <= min(by_tiles, dense) * WORTH else gemv
        tiles = rows if min(by_gemv, by_tiles) <= dense * WORTH else tiles
    kind = configs.kind(weights[0])
    content["most_rows"]["gemv"][kind], content["most_rows"]["tiles"][kind] = gemv, tiles
    return f"linear {kind}: gemv up to {gemv} rows, tiles up to {tiles}, then a dense product"


def _least_rows(name: str, content: dict[str, Any], device: torch.device, note: Note) -> str:
    """From how many rows on a kernel of PyTorch's is at least as fast as the one that is chosen here without it."""
    (op, scheme), impl = RIVALS[name], _rival(name, device)
    weights, behind = _weights(scheme, device, layout="", experts=op == "grouped_linear"), 0
    for rows in ROWS:
        every = [_arguments(op, scheme, rows, weight) for weight in weights]
        ours, run = next(
            (own, run) for its, own, run, refuses in kernels.KERNELS if its == op and not refuses(*every[0])
        )
        theirs = _time(lambda args: impl.run(*args), every, device, note, rows=rows, kernel=name)
        mine = _time(lambda args: run(*args), every, device, note, rows=rows, kernel=ours)  # noqa: B023
        behind = rows if theirs > mine else behind
    content["least_rows"][name] = None if behind == ROWS[-1] else behind + 1
    return f"{op} {scheme}: {name} " + ("never" if behind == ROWS[-1] else f"from {behind + 1} rows on")


def _arguments(op: str, scheme: str, rows: int, weight: Weight) -> tuple[Any, ...]:
    act, device, k = preset(scheme).act, weight.data.device, weight.k
    if op == "grouped_linear":
        ends = torch.arange(rows, EXPERTS * rows + 1, rows, dtype=torch.int32, device=device)
        return _rows(EXPERTS * rows, device, k), ends, *weight
    return _rows(rows, device, k), *weight, *((act, None) if act else ()), None


def _weights(
    scheme: str, device: torch.device, size: int = 0, copies: int = 0, layout: str = "plain", experts: bool = False
) -> list[Weight]:
    """As many copies of one weight as fill the cache twice, so that each comes from memory when it is its turn.
    ``layout``: "" for the one that the device takes."""
    chosen, size = preset(scheme), size or SIZE
    value = torch.randn(size, size, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16) * 0.02
    parts = quantize(value.expand(EXPERTS, size, size) if experts else value, chosen.weight)
    one = Weight(*parts, chosen.weight.dtype, size, size, *chosen.weight.block_shape(size, size), "plain")
    layout = layout or layouts.preferred(device, one.matrix, parts, chosen.act)
    packed = layouts.repack(one.matrix, Quantized(*parts), "plain", layout)
    one = one._replace(**packed._asdict(), layout=layout)
    copies = copies or -(-2 * Accelerator(device).cache // one.data.nbytes)
    return [one, *(one._replace(data=one.data.clone()) for _ in range(copies - 1))]


def _rows(rows: int, device: torch.device, size: int = 0) -> Tensor:
    return torch.randn(rows, size or SIZE, generator=torch.Generator().manual_seed(rows)).to(device, torch.bfloat16)


def _time(run: Callable[[Any], object], copies: list[Any], device: torch.device, note: Note, **trial: Any) -> float:
    """Seconds of the device for one call, the median of plays of a graph that calls with each copy in turn: neither the
    launch nor a weight left in the cache is measured. What the device has no memory or no units for takes forever, and
    so does a kernel of PyTorch's that fails."""
    gpu = Accelerator(device)
    try:
        play, _ = gpu.recorded(lambda: [run(copy) for copy in copies])
    except (triton.TritonError, RuntimeError, ValueError) as error:
        note({**trial, "us": None, "reason": str(error).strip().splitlines()[0][:200]})
        gpu.synchronize()
        return math.inf
    seconds = statistics.median(gpu.seconds(play) for _ in range(PLAYS)) / len(copies)
    note({**trial, "us": round(seconds * 1e6, 2)})
    return seconds
