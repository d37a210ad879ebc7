"""Measure on the current device which block sizes and which kernels are the fastest for each number of rows.

Each stage saves its part of the table in the user's cache folder, so an interrupted run resumes if device and versions
are the same. Block sizes are found by coordinate descent from the table in use: all values of one size are tried with
the others fixed, until no change is worth it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
from bitport.numerics import quantize
from bitport.ops import IMPLS, Weight
from bitport.schemes import preset

SCHEMES = (
    *("int4", "int8", "nf4", "mxfp4-wo", "int3", "fp8-wo", "nvfp4-wo", "int4-channel", "int8-g128"),
    *("int2", "int5", "int6", "fp8-e5m2-wo", "mxfp8-wo", "mxfp6-wo"),
)
"""The most used come first."""
RIVALS = {
    "few_rows": ("linear", "int4"),
    "few_rows_int8": ("linear", "int8"),
    "many_rows": ("linear", "int4"),
    "many_rows_int8": ("linear", "int8"),
    "int_mm": ("dyn_linear", "int8-dyn"),
    "scaled_mm": ("dyn_linear", "fp8-row"),
    "scaled_mm_blocks": ("dyn_linear", "fp8-block"),
    "scaled_mm_mx": ("dyn_linear", "mxfp8"),
    "int4pack_mm": ("linear", "int4"),
    "int8pack_mm": ("linear", "int8"),
    "grouped_mm": ("grouped_linear", "int4"),
}
"""Kernel that is asked before those here (PyTorch's and those in CUDA C++) -> its op, and a scheme that it takes for at
least one row."""
EXPERTS = 8
"""Experts of a grouped product, each with as many rows as a single weight would have."""
SIZE = 4096
"""N and K of the weights that are measured."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
WORTH = 1.02
"""How much faster an alternative must be; repeated timings differ by as much."""
Sizes: TypeAlias = dict[str, tuple[int, ...]]
PROGRAMS = (128, 256, 512, 1024, 2048)
GEMV: Sizes = {
    "BN": (2, 4, 8, 16, 32),
    "BK": (256, 512, 1024, 2048),
    "num_warps": (1, 2, 4, 8),
    "num_stages": (1, 2, 3, 4),
}
TILES: dict[int | None, Sizes] = {
    8: {
        "BM": (8, 16),
        "BN": (16, 32, 64, 128),
        "BK": (64, 128, 256),
        "num_warps": (2, 4, 8),
        "num_stages": (2, 3, 4, 5),
    },
    16: {"BM": (16,), "BN": (32, 64, 128), "BK": (64, 128, 256), "num_warps": (2, 4, 8), "num_stages": (2, 3, 4, 5)},
    32: {"BM": (16, 32), "BN": (64, 128), "BK": (64, 128, 256), "num_warps": (4, 8), "num_stages": (2, 3, 4, 5)},
    64: {"BM": (32, 64), "BN": (64, 128), "BK": (64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4, 5)},
    None: {
        "BM": (64, 128, 256),
        "BN": (64, 128, 256),
        "BK": (32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (2, 3, 4, 5),
    },
}
SCALED: Sizes = {"BM": (128,), "BN": (64, 128, 256), "BK": (128, 256), "num_warps": (4, 8), "num_stages": (2, 3, 4)}
"""Values that are tried, TILES by rows (None: any number), along with PROGRAMS."""
MOST_GEMV = 16
PLAYS = 7
REFERENCE = "int4"
"""The scheme for which block sizes are measured."""
Note: TypeAlias = Callable[[dict[str, Any]], None]
"""Receives each trial: stage, rows, blocks or kernel, and microseconds (None if it could not run)."""


def tune(device: torch.device, note: Note = lambda trial: None) -> Iterator[str]:
    """Measure all stages and save them for later processes; yield a line about each. Of PyTorch's kernels only those
    that are registered are measured."""
    measured.check_kept()
    file, content = configs.path(configs.architecture(device)), begun(device)
    while content["unmeasured"]:
        stage = content["unmeasured"][0]
        try:
            found = measure(stage, content, device, functools.partial(_of_stage, stage, note))
        except RuntimeError:  # e.g. an illegal memory access: the next call does the other stages first
            content["unmeasured"].append(content["unmeasured"].pop(0))
            _keep(file, content)
            raise
        content["unmeasured"].remove(stage)
        _keep(file, content)
        yield found
    del content["unmeasured"]
    for_others(content)
    _keep(file, content)
    yield f"written to {file}"


def for_others(content: dict[str, Any]) -> None:
    """Set the entry for kinds of weights that were not measured to the median of those that were."""
    for kinds in content["most_rows"].values():
        if known := [most for kind, most in kinds.items() if kind != "*"]:
            kinds["*"] = int(statistics.median(known))


def _of_stage(stage: str, note: Note, trial: dict[str, Any]) -> None:
    note({"stage": stage, **trial})


def _keep(file: Path, content: dict[str, Any]) -> None:
    measured.write(file, content)
    configs.of.cache_clear()


def source(device: torch.device) -> str:
    about = Accelerator(device).about()["device"]
    return f"measured on {about} with torch {torch.__version__}, triton {triton.__version__}"


def begun(device: torch.device) -> dict[str, Any]:
    """Return the table as far as it was measured here, with the stages left; rival kernels that are new count too."""
    content = copy.deepcopy(configs.of(device).content)
    rivals = [name for name in RIVALS if _rival(name, device)]
    if content["source"] == source(device):
        left = content.get("unmeasured", [])
        new = [f"from {name}" for name in rivals if name not in content["least_rows"]]
        if left or new:
            return {**content, "unmeasured": [*(stage for stage in new if stage not in left), *left]}
    stages = ["gemv", *(f"tiles {rows or 'any'}" for rows in TILES), *(f"rows {scheme}" for scheme in SCHEMES)]
    stages += ["scaled"] if configs.of(device).scaled else []
    stages += [f"from {name}" for name in rivals]
    tiles = [{**configs.blocks_for(content["tiles"], rows or math.inf), "rows": rows} for rows in TILES]
    most = {kernel: {"*": kinds["*"]} for kernel, kinds in content["most_rows"].items()}
    return {**content, "source": source(device), "tiles": tiles, "most_rows": most, "unmeasured": stages}


def _rival(name: str, device: torch.device) -> Any:
    """Return the kernel of RIVALS called ``name`` if this device has it and it takes the scheme, else None."""
    op, scheme = RIVALS[name]
    impl = next((each for each in IMPLS.get((op, device.type), []) if each.name == name), None)
    if impl is None:
        return None
    weight = _weights(scheme, device, 256, 1, "", op == "grouped_linear")[0]
    args = _arguments(op, scheme, _inputs(op, 1, weight), weight)
    with _no_table(device):
        return impl if impl.supports(*args) is None else None


@contextlib.contextmanager
def _no_table(device: torch.device) -> Iterator[None]:
    """Disable least_rows of the table in use, so that kernels do not refuse because of it."""
    known = LEAST_ROWS.pop(device.type, None)
    try:
        yield
    finally:
        if known:
            LEAST_ROWS[device.type] = known


def measure(stage: str, content: dict[str, Any], device: torch.device, note: Note) -> str:
    """Measure a stage, store the result in ``content`` and return a line about it."""
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

    def runs(blocks: dict[str, Any]) -> Callable[[Weight], Tensor]:
        whole = {**begin, **blocks}
        single = whole if stage == "gemv" else [{**whole, "rows": None}]
        config = _config({**content, what: single}, device)
        return functools.partial(_product, what, x, scheme, config)

    def compile_all(every: list[dict[str, Any]]) -> None:
        _compile((functools.partial(runs(blocks), weights[0]) for blocks in every), device)

    def trial(blocks: dict[str, Any]) -> float:
        return _time(runs(blocks), weights, device, note, rows=rows, blocks=blocks)

    blocks, seconds = search({**sizes, "programs": PROGRAMS}, begin, trial, compile_all)
    begin.update(blocks)
    return f"{stage}: {blocks}, {seconds * 1e6:.1f} us"


def _config(content: dict[str, Any], device: torch.device) -> Config:
    return configs.for_architecture(content, configs.architecture(device))


def _product(what: str, x: Tensor, scheme: str, config: Config, weight: Weight) -> Tensor:
    if what == "dense":
        return kernels.dense_mm(x, *weight, None)
    if what == "scaled":
        return scaled.product(x, scheme, None, weight, None, config)
    return (linear.gemv if what == "gemv" else linear.tiles)(
        linear.prepared(x, "", None), weight, None, x.dtype, config
    )


def _compile(runs: Iterable[Callable[[], object]], device: torch.device) -> None:
    """Compile in parallel: at half a second each, sequential compilation would dominate the run time. Failures are left
    to the timed trial, which records the reason. The interpreter compiles nothing."""
    if triton.knobs.runtime.interpret:
        return

    def run(each: Callable[[], object]) -> None:
        with contextlib.suppress(triton.TritonError, RuntimeError, ValueError), kernels.on(device):
            each()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, runs))


def search(
    sizes: Sizes,
    begin: dict[str, Any],
    time: Callable[[dict[str, Any]], float],
    ready: Callable[[list[dict[str, Any]]], None] = lambda trials: None,
) -> tuple[dict[str, Any], float]:
    """Return (the best sizes, their seconds); ``ready`` receives trials before they are timed."""
    best = {name: begin[name] for name in sizes}
    known = {tuple(best.values()): time(best)}
    seconds, better = known[tuple(best.values())], True
    while better:
        better = False
        for name, values in sizes.items():
            trials = [{**best, name: value} for value in values]
            fresh = [trial for trial in trials if tuple(trial.values()) not in known]
            ready(fresh)
            for trial in fresh:
                known[tuple(trial.values())] = taken = time(trial)
                if taken * WORTH < seconds:
                    best, seconds, better = trial, taken, True
    return best, seconds


def _crossovers(scheme: str, content: dict[str, Any], device: torch.device, note: Note) -> str:
    """Find the most rows for gemv, and those for tiles before a dense product is faster."""
    weights, config = _weights(scheme, device), _config(content, device)
    runs: dict[tuple[str, int], Callable[[Weight], object]] = {}
    for rows in ROWS:
        x = _rows(rows, device)
        for what in ("tiles", "gemv") if rows <= MOST_GEMV else ("tiles",):
            runs[what, rows] = functools.partial(_product, what, x, scheme, config)
        runs["dense", rows] = functools.partial(_product, "dense", x, scheme, config)
    _compile((functools.partial(run, weights[0]) for run in runs.values()), device)
    seconds = {
        (what, rows): _time(run, weights, device, note, rows=rows, kernel=what) for (what, rows), run in runs.items()
    }
    gemv = tiles = 0
    for rows in ROWS:
        by_gemv, by_tiles, dense = (seconds.get((what, rows), math.inf) for what in ("gemv", "tiles", "dense"))
        gemv = rows if by_gemv <= min(by_tiles, dense) * WORTH else gemv
        tiles = rows if min(by_gemv, by_tiles) <= dense * WORTH else tiles
    kind = measured.kind(weights[0])
    content["most_rows"]["gemv"][kind], content["most_rows"]["tiles"][kind] = gemv, tiles
    return f"linear {kind}: gemv up to {gemv} rows, tiles up to {tiles}, then a dense product"


def _least_rows(name: str, content: dict[str, Any], device: torch.device, note: Note) -> str:
    """Find the number of rows from which a kernel of RIVALS is, for all that it takes, at least as fast as the kernel
    here that would be chosen without it."""
    (op, scheme), impl = RIVALS[name], _rival(name, device)
    weights, behind = _weights(scheme, device, layout="", experts=op == "grouped_linear"), 0
    inputs = {rows: _inputs(op, rows, weights[0]) for rows in ROWS}
    given = {rows: [_arguments(op, scheme, x, weight) for weight in weights] for rows, x in inputs.items()}
    with _no_table(device):
        given = {rows: every for rows, every in given.items() if impl.supports(*every[0]) is None}
    ours = {rows: _own(op, every[0]) for rows, every in given.items()}
    _compile((functools.partial(run, *given[rows][0]) for rows, (_, run) in ours.items()), device)
    for rows, every in given.items():
        own, run = ours[rows]
        theirs = _time(lambda args: impl.run(*args), every, device, note, rows=rows, kernel=name)
        mine = _time(lambda args: run(*args), every, device, note, rows=rows, kernel=own)  # noqa: B023
        behind = rows if theirs > mine else behind
    never = behind == max(given, default=0)
    content["least_rows"][name] = None if never else behind + 1
    return f"{op} {scheme}: {name} " + ("never" if never else f"from {behind + 1} rows on")


def _own(op: str, args: tuple[Any, ...]) -> tuple[str, Callable[..., Any]]:
    """Return (name, run) of the kernel here that is chosen without the rivals."""
    return next((name, run) for its, name, run, refuses in kernels.KERNELS if its == op and not refuses(*args))


def _inputs(op: str, rows: int, weight: Weight) -> Tensor:
    """Return inputs with ``rows`` rows, for each expert if there are any."""
    return _rows(EXPERTS * rows if op == "grouped_linear" else rows, weight.data.device, weight.k)


def _arguments(op: str, scheme: str, x: Tensor, weight: Weight) -> tuple[Any, ...]:
    act, rows = preset(scheme).act, x.shape[0] // EXPERTS
    if op == "grouped_linear":
        ends = torch.arange(rows, x.shape[0] + 1, rows, dtype=torch.int32, device=x.device)
        return x, ends, *weight
    return x, *weight, *((act, None) if act else ()), None


def _weights(
    scheme: str, device: torch.device, size: int = 0, copies: int = 0, layout: str = "plain", experts: bool = False
) -> list[Weight]:
    """Return enough copies of a weight to fill the cache twice, so that each is read from memory in its turn.
    ``layout``: "" for the device's preferred one."""
    chosen, size = preset(scheme), size or SIZE
    value = torch.randn(size, size, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16) * 0.02
    parts = quantize(value.expand(EXPERTS, size, size) if experts else value, chosen.weight)
    one = Weight.of(parts, chosen.weight, size, size)
    one = one.to_layout(layout or layouts.preferred(device, one.matrix, parts, chosen.act))
    copies = copies or -(-2 * Accelerator(device).cache // one.data.nbytes)
    return [one, *(one._replace(data=one.data.clone()) for _ in range(copies - 1))]


def _rows(rows: int, device: torch.device, size: int = 0) -> Tensor:
    return torch.randn(rows, size or SIZE, generator=torch.Generator().manual_seed(rows)).to(device, torch.bfloat16)


def _time(run: Callable[[Any], object], copies: list[Any], device: torch.device, note: Note, **trial: Any) -> float:
    """Return device seconds per call, as the median over replays of a graph that calls with each copy in turn, which
    excludes launch overhead and cached weights. Calls that fail, for lack of memory or hardware support or in a kernel
    of PyTorch's, take infinitely long."""
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
