"""Speed of quantization by rounding to nearest, including packing: bytes of bf16 weight per second, relative to the
read bandwidth measured in the same run. Measured for ``quantize_tensor`` alone, and for a layer by ``quantize_``, where
bitport also checks for NaN and measures the error. Compared with torchao's equivalent, if installed."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import bitport
from bench import limits
from bench.child import operands
from bench.measure import busy, header, record
from bench.products import shape_of
from bench.suites import Shape
from bitport.evaluate.timing import spread
from bitport.report.text import table

SHAPES = (Shape(4096, 4096), Shape(4096, 14336))
TENSOR, LAYER, TORCHAO = "bitport", "bitport quantize_", "torchao"
SCHEMES = ("int4", "int8", "fp8-wo", "mxfp4-wo")

Row = dict[str, Any]


def layer_of(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def tensor_of(weight: Tensor) -> dict[str, Callable[[], Any]]:
    return {name: functools.partial(bitport.quantize_tensor, weight, name) for name in SCHEMES}


def bitport_of(weight: Tensor) -> dict[str, Callable[[], Any]]:
    return {name: lambda name=name: bitport.quantize_(layer_of(weight), name, progress=False) for name in SCHEMES}


def torchao_of(weight: Tensor) -> dict[str, Callable[[], Any]]:
    from torchao import quantization as ao
    from torchao.quantization.granularity import PerGroup

    configs: dict[str, Any] = {
        "int4": ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(128)),
        "int8": ao.Int8WeightOnlyConfig(),
        "fp8-wo": ao.Float8WeightOnlyConfig(),
    }

    return {name: lambda config=config: ao.quantize_(layer_of(weight), config) for name, config in configs.items()}


def measure(shape: Shape, found: limits.Limits | str, repetitions: int) -> list[Row]:
    """Candidates take turns, with one call per turn."""
    weight, _ = operands(shape, 1)
    libraries = {TENSOR: tensor_of, LAYER: bitport_of}
    if importlib.util.find_spec("torchao"):
        libraries[TORCHAO] = torchao_of
    candidates = {(library, name): run for library, by in libraries.items() for name, run in by(weight).items()}
    times: dict[tuple[str, str], list[float]] = {key: [] for key in candidates}
    for at in range(repetitions + 1):
        for key, run in candidates.items():
            start = time.perf_counter()
            run()
            if at:  # the first call of each is not counted
                times[key].append(time.perf_counter() - start)
    return [
        {"library": library, "scheme": scheme, "k": shape.k, "n": shape.n, **figures(each, weight.nbytes, found)}
        for (library, scheme), each in times.items()
    ]


def figures(times: list[float], nbytes: int, found: limits.Limits | str) -> Row:
    seconds = statistics.median(times)
    row: Row = {"ms": float(f"{seconds * 1e3:.4g}"), "bytes_per_second": float(f"{nbytes / seconds:.4g}")}
    row["noise"] = round(spread(times), 4) if len(times) > 2 else None
    return row if isinstance(found, str) else {**row, "of_read": float(f"{nbytes / seconds / found.read:.3g}")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=list(SHAPES), help="KxN, in x out features")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="append the rows to bench/results/quantize.jsonl")
    options = parser.parse_args()
    found = limits.measure(torch.get_num_threads())
    if isinstance(found, str):
        print(f"without the limits of the machine: {found}")
    head = header() | {"busy": busy(), "read": found if isinstance(found, str) else found.read}
    if not importlib.util.find_spec("torchao"):
        print("without torchao: it is not installed here (make bench-peers)")
    rows = [row for shape in options.shapes for row in measure(shape, found, options.repetitions)]
    keys = ("library", "scheme", "k", "n", "ms", "bytes_per_second", "of_read", "noise")
    print(table(keys, [tuple(str(row.get(key, "-")) for key in keys) for row in rows]))
    if options.json:
        record("quantize", head, rows)


if __name__ == "__main__":
    main()
