"""Time and accuracy of quantized products on a GPU, compared with peers and the limits of the device.

As in ``bench.products``, candidates take turns, a ratio is the median over repetitions of the ratio to bf16 within one,
and what a peer cannot do is reported with the reason. Times are measured by the device, of calls in a graph.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

import torch

from bench import products, suites
from bench.gpu.accelerator import Accelerator, present, tables
from bench.gpu.child import GpuChild
from bench.gpu.limits import GpuLimits, measure
from bench.gpu.peers import PEERS
from bench.gpu.peers.own import SCHEMES
from bench.measure import RESULTS, append, header
from bench.products import Chosen, Row
from bench.results import lines_of, runs_of
from bench.suites import Shape

SUITE = "gpu-products"
QUICK_SCHEMES = ("int4", "nf4", "int8", "int8-dyn", "fp8-row")


class GpuField(products.Field):
    """A Field with GPU peers, in processes that use the device."""

    child = GpuChild
    peers = PEERS
    side_by_side = True


def run(chosen: Chosen, about: Row, found: GpuLimits, head: Row | None) -> list[Row]:
    """Measure all rows; append them to the results shape by shape if ``head`` is the header that they belong to."""
    field = GpuField(chosen)
    try:
        for peer, reason in field.missing.items():
            print(f"without {peer}: {reason}")
        if head is not None:
            head |= {"gpu": about, "limits": as_data(found), "versions": field.versions, "missing": field.missing}
            head |= {"tables": tables(), "chosen": described(chosen)}
            append(SUITE, [head])
        rows: list[Row] = []
        for shape in chosen.shapes:
            fresh = [with_floor(row, found) for row in products.measure_shape(field, shape, "by the device", _nothing)]
            print(f"\n{suites.suite_of(shape)}: {shape} (in x out)\n{products.as_table(fresh)}")
            for line in dict.fromkeys(refusal(row) for row in fresh if "reason" in row):
                print(f"not measured: {line}")
            sys.stdout.flush()
            if head is not None:
                append(SUITE, [{"run": head["run"], **row} for row in fresh])
            rows += fresh
        return rows
    finally:
        field.close()


def described(chosen: Chosen) -> Row:
    """What runs must have in common for one to continue another."""
    return {"rows": list(chosen.rows), "schemes": list(chosen.schemes), "peers": list(chosen.peers)}


def without_measured(chosen: Chosen, about: Row, commit: str, lines: list[Row]) -> Chosen:
    """Remove shapes that a run with this commit, device and selection has already measured."""
    mine = {
        run
        for run, head in runs_of(lines).items()
        if (head["commit"], head["gpu"], head["chosen"]) == (commit, about, described(chosen))
    }
    done = {Shape(line["k"], line["n"]) for line in lines if line["run"] in mine and "k" in line}
    return chosen._replace(shapes=tuple(shape for shape in chosen.shapes if shape not in done))


def refusal(row: Row) -> str:
    return f"{row['peer']} {row['variant']}: {row['reason']}"


def _nothing() -> None:
    """No-op: the copies of the weight flush the caches themselves."""


def with_floor(row: Row, found: GpuLimits) -> Row:
    """Add the lower bound for the unit of the class: int8, float8, or bf16."""
    if "ms" not in row:
        return row
    inputs = row["class"].rpartition(" x ")[2]
    limits: Any = found
    if inputs.startswith(("fp8", "mxfp8")) and found.float8:
        limits = dataclasses.replace(found, units={"float8": found.float8})
    floor = limits.floor(row["rows"], row["n"], row["k"], row["nbytes"], inputs == "int8")
    figures = {"floor_ms": float(f"{floor * 1e3:.4g}"), "of_floor": round(floor * 1e3 / row["ms"], 3)}
    return {**row, **figures}


def as_data(found: GpuLimits) -> Row:
    return {"copy": found.read, **found.units, "float8": found.float8, "why": found.why}


def chosen_of(options: argparse.Namespace) -> Chosen:
    peers = PEERS if options.peers is None else options.peers
    return products.chosen_from(options, QUICK_SCHEMES if options.quick else SCHEMES, peers, torch.get_num_threads())


def parser() -> argparse.ArgumentParser:
    made = products.choosing(__doc__, SCHEMES, PEERS)
    made.add_argument("--go-on", action="store_true", help="leave out shapes that a stopped run of the same has left")
    made.add_argument("--json", action="store_true", help=f"append the results to bench/results/{SUITE}.jsonl")
    return made


def limits_of(gpu: Accelerator) -> GpuLimits:
    found = measure(gpu)
    units = ", ".join(f"{name} {rate / 1e12:.0f}" for name, rate in {**found.units, "float8": found.float8}.items())
    print(f"memory is copied at {found.read / 1e9:.0f} GB/s; 10^12 operations per second: {units}")
    return found


def main() -> None:
    options = parser().parse_args()
    gpu, chosen, head = present(), chosen_of(options), header()
    if options.go_on:
        chosen = without_measured(chosen, gpu.about(), head["commit"], lines_of(RESULTS / f"{SUITE}.jsonl"))
    if not chosen.shapes:
        print("every shape was measured already")
        return
    run(chosen, gpu.about(), limits_of(gpu), head if options.json else None)


if __name__ == "__main__":
    main()
