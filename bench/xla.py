"""Products on XLA: how close is a low-bit weight to bfloat16 when XLA alone compiles it?

    python -m bench.xla [--json] [--shape 2048x2048] [--rows 1 512]

Every candidate is a function under jax.jit on JAX's default device; x is bfloat16. The candidates take turns, and a
ratio is the median over turns of the candidate's time over bfloat16's in the same turn. On the CPU it is a bound on how
badly XLA may do rather than a target: bitport's own kernels are the fast ones there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array

from bench.measure import append, busy, header
from bitport.backends.xla.functions import FUNCTIONS
from bitport.backends.xla.move import to_array, weight_arrays
from bitport.evaluate.timing import interleaved, medians, ratio, spread
from bitport.numerics import quantize
from bitport.ops import Weight, samples
from bitport.report.text import table
from bitport.schemes import preset

CANDIDATES = (("int8", "k_major"), ("int8", "plain"), ("int4", "k_major"), ("int4", "plain"), ("int8-dyn", "k_major"))
LIMIT = 1.5
BASE = ("bf16", "k_major")


def bf16(value: torch.Tensor) -> tuple[Callable[..., Array], tuple[Any, ...]]:
    def run(x: Array, w: Array) -> Array:
        sums = jax.lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return sums.astype(x.dtype)

    return jax.jit(run), (to_array(value.T.contiguous()),)


def candidate(value: torch.Tensor, name: str, layout: str) -> tuple[Callable[..., Array], tuple[Any, ...]]:
    scheme, (n, k) = preset(name), value.shape
    parts = quantize(value, scheme.weight)
    weight = weight_arrays(Weight.of(parts, scheme.weight, n, k).to_layout(layout))
    rest = (scheme.act, None, None) if scheme.act else (None,)
    function = FUNCTIONS["dyn_linear" if scheme.act else "linear"]

    def run(x: Array, *arrays: Any) -> Array:
        return function(x, *arrays, *weight[4:], *rest)

    return jax.jit(run), weight[:4]


def measure(n: int, k: int, rows: int) -> list[dict[str, Any]]:
    cpu = torch.device("cpu")
    value = samples.values(cpu, torch.bfloat16, n, k)
    x = to_array(samples.rows(cpu, torch.bfloat16, rows, k))
    made = {BASE: bf16(value), **{each: candidate(value, *each) for each in CANDIDATES}}

    def call(function: Callable[..., Array], args: tuple[Any, ...]) -> Callable[[], Array]:
        return lambda: function(x, *args).block_until_ready()

    times = interleaved({"/".join(each): call(*of) for each, of in made.items()}, seconds=0.03)
    middle = medians(times)
    found = []
    for name, layout in made:
        key, base = f"{name}/{layout}", "/".join(BASE)
        ratios = [mine / other for mine, other in zip(times[key], times[base], strict=True)]
        found.append(
            {
                "scheme": name,
                "layout": layout,
                "n": n,
                "k": k,
                "rows": rows,
                "ms": round(1000 * middle[key], 4),
                "ratio": round(ratio(times, key, base), 3),
                "noise": round(spread(ratios), 3),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="append to bench/results/xla.jsonl")
    parser.add_argument("--shape", default="2048x2048", help="KxN")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 512])
    args = parser.parse_args()
    k, n = map(int, args.shape.split("x"))
    first = {**header(), "jax": jax.__version__, "device": jax.devices()[0].device_kind, "busy": busy()}
    found = [row for rows in args.rows for row in measure(n, k, rows)]
    print(table(list(found[0]), [[str(cell) for cell in row.values()] for row in found]))
    print(f"wanted: int4 and int8 within {LIMIT} of bf16 in the better of their layouts")
    if args.json:
        append("xla", [first, *({"run": first["run"], **row} for row in found)])


if __name__ == "__main__":
    main()
