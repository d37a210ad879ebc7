"""Compare algorithms with their reference implementations, on the same layer and inputs: the time from a bf16 weight
and inputs to codes and scales, and the resulting error.

The error is that of the layer's output relative to its squared norm, on the inputs that both saw; for HQQ, which uses
none, it is the mean of |w - q|^0.7, its own loss.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from bench.measure import busy, header, record
from bench.products import shape_of
from bench.suites import Shape
from bitport.algorithms.awq_core import Factor
from bitport.algorithms.scaling import Scaling
from bitport.calibrate.inputs import Inputs
from bitport.numerics import dequantize, quantize
from bitport.report.text import table
from bitport.schemes import preset

REFERENCES = {
    "hqq": "hqq_reference",
    "gptq": "gptq_reference",
    "awq": "awq_reference",
    "signround": "autoround_reference",
}
SHAPES = (Shape(1024, 1024), Shape(1024, 3072))
ROWS = 8192

Row = dict[str, Any]


def reference(name: str) -> ModuleType | str:
    """The adapter, or why it is missing."""
    try:
        return importlib.import_module(f"bench.references.{REFERENCES[name]}")
    except ImportError as error:
        return f"{type(error).__name__}: {error}"


def operands(k: int, n: int, rows: int = ROWS, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight with outliers, and correlated inputs of uneven magnitude, as in a trained model."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    weight = 0.02 * normal(n, k)
    weight = torch.where(torch.rand(n, k, generator=generator) < 0.005, 5 * weight, weight)
    mixing = normal(k, k) * (torch.arange(1, k + 1) ** -0.5)[:, None] + 0.3 * torch.eye(k)
    x = normal(rows, k) @ mixing * normal(k).mul(0.7).exp()
    return weight.bfloat16(), x.bfloat16()


def ours(module: ModuleType, weight: Tensor, x: Tensor) -> Tensor:
    fmt, by, inputs = preset(module.SCHEME).weight, module.ALGORITHM, None
    if isinstance(by, Scaling) or by.needs_inputs:
        inputs = Inputs((), weight.shape[1])
        inputs.add(x)
    if not isinstance(by, Scaling):
        return dequantize(by.solve(weight, fmt, inputs), fmt, *weight.shape)
    assert inputs is not None
    channels = torch.arange(weight.shape[1])
    scale = by.search([Factor(weight, fmt, inputs.gram, inputs.rows, channels)], channels.shape).scale
    return dequantize(quantize((weight * scale).to(weight.dtype), fmt), fmt, *weight.shape) / scale


def error(name: str, weight: Tensor, q: Tensor, x: Tensor) -> float:
    difference = weight.double() - q.double()
    if name == "hqq":
        return float((difference.abs() ** 0.7).mean())
    rows = x.double()
    return float((rows @ difference.t()).square().sum() / (rows @ weight.double().t()).square().sum())


def measure(name: str, module: ModuleType, shape: Shape, repetitions: int) -> Row:
    """Measure both implementations, in turns."""
    weight, x = operands(shape.k, shape.n)
    both: dict[str, Callable[[], Tensor]] = {
        "": lambda: ours(module, weight, x),
        "reference_": lambda: module.solve(weight, x),
    }
    times: dict[str, list[float]] = {who: [] for who in both}
    found: dict[str, Tensor] = {}
    for _ in range(repetitions):
        for who, run in both.items():
            start = time.perf_counter()
            found[who] = run()
            times[who].append(time.perf_counter() - start)
    row: Row = {"algorithm": name, "scheme": module.SCHEME, "k": shape.k, "n": shape.n}
    row["reference"] = {package: version(package) for package in module.PACKAGES}
    row |= {f"{who}seconds": float(f"{statistics.median(each):.4g}") for who, each in times.items()}
    row |= {f"{who}error": float(f"{error(name, weight, q, x):.5g}") for who, q in found.items()}
    ratios = [theirs / mine for mine, theirs in zip(times[""], times["reference_"], strict=True)]
    return row | {"speedup": float(f"{statistics.median(ratios):.3g}")}


def rows(names: Sequence[str], shapes: Sequence[Shape], repetitions: int) -> Iterator[Row]:
    for name in names:
        module = reference(name)
        if isinstance(module, str):
            print(f"without the reference of {name}: {module} (make bench-algorithms installs it)")
            continue
        for shape in shapes:
            yield measure(name, module, shape, repetitions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithms", nargs="*", default=list(REFERENCES), help=f"default: {' '.join(REFERENCES)}")
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=list(SHAPES), help="KxN, in x out features")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="append the rows to bench/results/algorithms.jsonl")
    options = parser.parse_args()
    head = header() | {"busy": busy()}
    made = list(rows(options.algorithms, options.shapes, options.repetitions))
    keys = ("algorithm", "k", "n", "seconds", "reference_seconds", "speedup", "error", "reference_error")
    print(table(keys, [tuple(str(row[key]) for key in keys) for row in made]))
    if options.json:
        record("algorithms", head, made)


if __name__ == "__main__":
    main()
