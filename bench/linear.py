"""Quantized linear against torch's own in bfloat16, on the CPU: time and accuracy, side by side.

Each candidate goes through enough weights in turn that they do not stay in the caches, as the layers of a model do.
Rows of x are 1 (generation) to 512 (a prompt). SQNR is against float64 with the quantized weight: what the kernel
loses, not what the scheme does.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import bitport
from bench.measure import interleaved, medians, ratio, record
from bitport.numerics import sqnr
from bitport.ops import decide
from bitport.ops.functional import operand
from bitport.report.text import table

SHAPES = ((4096, 4096), (1024, 4096))
ROWS = (1, 4, 16, 64, 128, 512)
SCHEMES = ("int4", "int4-g32", "nf4", "int8")
BYTES = 128 << 20
"""Of bf16 weights that a candidate goes through: more than caches hold."""


def weights(n: int, k: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    count = max(2, BYTES // (2 * n * k))
    return [(torch.randn(n, k, generator=generator) * 0.02).bfloat16() for _ in range(count)]


def turns(x: Tensor, every: list[Any]) -> Callable[[], Tensor]:
    """A call is the product with the next weight."""
    following = itertools.cycle(every)
    return lambda: F.linear(x, next(following))


def measure(n: int, k: int, schemes: list[str], rows: list[int], repetitions: int) -> list[dict[str, Any]]:
    dense = weights(n, k)
    quantized = {name: [bitport.quantize_tensor(w, bitport.preset(name)) for w in dense] for name in schemes}
    found = []
    for m in rows:
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).bfloat16()
        candidates = {"bf16": turns(x, dense), **{name: turns(x, every) for name, every in quantized.items()}}
        with torch.inference_mode():
            times = interleaved(candidates, repetitions=repetitions, seconds=0.02)
        middle = medians(times)
        for name, every in quantized.items():
            q = every[0]
            exact = x.double() @ q.dequantize(torch.float32).double().t()
            found.append(
                {
                    "n": n,
                    "k": k,
                    "rows": m,
                    "scheme": name,
                    "kernel": decide("linear", x, *operand(q), None).kernel,
                    "bf16_us": round(middle["bf16"] * 1e6, 1),
                    "quantized_us": round(middle[name] * 1e6, 1),
                    "speedup": round(1 / ratio(times, name, "bf16"), 2),
                    "sqnr_db": round(float(sqnr(exact, F.linear(x, q))), 1),
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="append the rows to bench/results/linear.jsonl")
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--shapes", nargs="+", default=[f"{n}x{k}" for n, k in SHAPES], help="N x K, e.g. 4096x4096")
    parser.add_argument("--repetitions", type=int, default=11)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for shape in options.shapes:
        n, k = map(int, shape.split("x"))
        rows += measure(n, k, options.schemes, options.rows, options.repetitions)
    keys = ("n", "k", "rows", "scheme", "kernel", "bf16_us", "quantized_us", "speedup", "sqnr_db")
    print(table(keys, [tuple(str(row[key]) for key in keys) for row in rows]))
    if options.json:
        print(f"appended to {record('linear', rows).name}")


if __name__ == "__main__":
    main()
