"""Compile the kernel by libtpu for absent TPUs: ``python -m bench.tpu_compile [--json]``.

Ahead-of-time compilation needs libtpu but no TPU. It rejects what the hardware cannot hold or do. What it reports for
the rest is recorded: size of the operands in HBM, the kernel's VMEM, and the operations that the kernel declares.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from bench.measure import append, header
from bitport.backends.xla.functions import FUNCTIONS
from bitport.backends.xla.k_major import NAME
from bitport.report.text import table

TOPOLOGIES = ("v5e:2x2", "v6e:2x2")
SHAPES = ((4096, 4096), (14336, 4096))
ROWS = (1, 512)
GROUPS = (128, 0)
"""0: one scale per channel."""


def prepare() -> None:
    """Keep libtpu from looking for the machine that it runs on."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")


@functools.cache
def device(topology: str) -> SingleDeviceSharding:
    described = topologies.get_topology_desc(topology_name=topology, platform="tpu")
    return SingleDeviceSharding(described.devices[0])


def compiled(topology: str, op: str, w: str, rows: int, k: int, n: int, group: int) -> Any:
    """The op with a k_major weight and bfloat16 inputs, compiled for one TPU."""
    size = group or k
    rest = ("int8", None, None) if op == "dyn_linear" else (None,)

    def run(x: Array, data: Array, scale: Array) -> Array:
        return FUNCTIONS[op](x, data, scale, None, None, w, n, k, 1, size, NAME, *rest)

    shapes = (((rows, k), jnp.bfloat16), ((k, n), jnp.dtype(w)), ((k // size, n), jnp.bfloat16))
    where = device(topology)
    args = [jax.ShapeDtypeStruct(shape, dtype, sharding=where) for shape, dtype in shapes]
    return jax.jit(run).lower(*args).compile()


def report(program: Any) -> dict[str, Any]:
    text = program.as_text()
    scoped = re.findall(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"', text)
    cost = program.cost_analysis() or {}
    memory = program.memory_analysis()
    return {
        "kernel": "tpu_custom_call" in text,
        "arguments": memory.argument_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "vmem": max(map(int, scoped), default=None),
        "flops": cost.get("flops"),
    }


def cases() -> Iterator[dict[str, Any]]:
    ops = ("linear", "dyn_linear")
    for topology, op, w, rows, (k, n), group in itertools.product(
        TOPOLOGIES, ops, ("int4", "int8"), ROWS, SHAPES, GROUPS
    ):
        yield {"topology": topology, "op": op, "w": w, "rows": rows, "k": k, "n": n, "group": group}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="append to bench/results/tpu_compile.jsonl")
    args = parser.parse_args()
    prepare()
    found = [{**case, **report(compiled(**case))} for case in cases()]
    print(table(list(found[0]), [[str(cell) for cell in row.values()] for row in found]))
    if args.json:
        from importlib.metadata import version

        first = {**header(), "jax": jax.__version__, "libtpu": version("libtpu")}
        append("tpu_compile", [first, *({"run": first["run"], **row} for row in found)])


if __name__ == "__main__":
    main()
