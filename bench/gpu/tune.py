"""Measure this GPU's table of blocks and crossovers, as ``bitport tune`` does, and record every trial.

If stopped, it continues where it was when run again. The table is in BITPORT_CACHE, or the user's cache folder.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.gpu.accelerator import Accelerator, present
from bench.measure import append, header
from bitport import plugins

SUITE = "gpu-tune"
Measure = Callable[[torch.device, Callable[[dict[str, Any]], None]], Iterator[str]]


def run(gpu: Accelerator, measure: Measure, source: str, keep: bool) -> None:
    """``source``: how the table describes its origin, which identifies its record."""
    head = {**header(), "gpu": gpu.about(), "source": source}
    if keep:
        append(SUITE, [head])

    def note(trial: dict[str, Any]) -> None:
        if keep:
            append(SUITE, [{"run": head["run"], **trial}])

    for line in measure(gpu.device, note):
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help=f"append each trial to bench/results/{SUITE}.jsonl")
    options = parser.parse_args()
    gpu = present()
    plugins.load()
    from bitport.backends.triton import measure

    run(gpu, measure.tune, measure.source(gpu.device), options.json)


if __name__ == "__main__":
    main()
