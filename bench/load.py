"""Time from a directory to the first token, relative to a bare read of its files, for the bundled model and a Llama of
a few hundred megabytes of random weights that is created in a temporary folder.

The bare read reads every shard into one buffer. Both are measured with the files in the page cache ("warm") and after
evicting them ("cold"), in turns. ``verify``: with checksums, the default; ``mmap``: without, so that nothing is read
before it is used. ``build_ms`` is the time that transformers takes to build the model without its weights, which no
checkpoint can reduce.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import bitport
from bench.measure import busy, header, record
from bench.models import NAMES, model_of
from bitport.evaluate.timing import spread
from bitport.integrations.huggingface import empty_model, load_model, save_model
from bitport.report.text import table

MODELS = ("tinylm", "llama-400m")
SCHEMES = ("int4", "int8")
MODES = ("verify", "mmap")
TEMPERATURES = ("cold", "warm")
BESIDE = ("read", "build")

Row = dict[str, Any]


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def forget(folder: Path) -> None:
    """Ask the system to evict the files from the page cache; fsync first, since dirty pages would stay."""
    for path in shards(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bare_read(folder: Path, buffer: bytearray) -> float:
    start = time.perf_counter()
    view = memoryview(buffer)
    for path in shards(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(view):
                pass
    return time.perf_counter() - start


def build(folder: Path) -> float:
    start = time.perf_counter()
    empty_model(folder)
    return time.perf_counter() - start


def first_token(folder: Path, verify: bool) -> float:
    start = time.perf_counter()
    model = load_model(folder, verify=verify)
    with torch.inference_mode():
        int(model(input_ids=torch.tensor([[1]]), use_cache=False, logits_to_keep=1).logits.argmax())
    return time.perf_counter() - start


def measure(folder: Path, repetitions: int) -> list[Row]:
    """One row for each mode and temperature, over the repetitions after a warm-up."""
    buffer = bytearray(8 << 20)
    runs: dict[str, Callable[[], float]] = {
        "read": lambda: bare_read(folder, buffer),
        "build": lambda: build(folder),
        "verify": lambda: first_token(folder, verify=True),
        "mmap": lambda: first_token(folder, verify=False),
    }
    times: dict[tuple[str, str], list[float]] = {}
    for at in range(repetitions + 1):
        for temperature in TEMPERATURES if hasattr(os, "posix_fadvise") else ("warm",):
            for name, run in runs.items():
                if temperature == "cold":
                    forget(folder)
                seconds = run()
                if at:
                    times.setdefault((name, temperature), []).append(seconds)
    nbytes = sum(path.stat().st_size for path in shards(folder))
    return [
        {
            "mode": mode,
            "cache": temperature,
            "nbytes": nbytes,
            **figures(each, *(times[what, temperature] for what in BESIDE)),
        }
        for (mode, temperature), each in times.items()
        if mode in MODES
    ]


def figures(times: list[float], read: list[float], built: list[float]) -> Row:
    """ratio: the median over repetitions of the time relative to the bare read's in the same repetition."""
    ratios = [mine / theirs for mine, theirs in zip(times, read, strict=True)]
    return {
        "ms": round(1e3 * statistics.median(times), 2),
        "read_ms": round(1e3 * statistics.median(read), 2),
        "build_ms": round(1e3 * statistics.median(built), 2),
        "ratio": round(statistics.median(ratios), 3),
        "noise": round(spread(ratios), 4) if len(ratios) > 2 else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=NAMES, default=list(MODELS))
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="append the rows to bench/results/load.jsonl")
    options = parser.parse_args()
    head, rows = header() | {"busy": busy()}, []
    for name in options.models:
        for scheme in options.schemes:
            model = model_of(name)
            bitport.quantize_(model, scheme, measure=False, progress=False)
            with tempfile.TemporaryDirectory() as folder:
                save_model(model, folder)
                del model
                rows += [{"model": name, "scheme": scheme, **row} for row in measure(Path(folder), options.repetitions)]
    keys = ("model", "scheme", "mode", "cache", "nbytes", "ms", "read_ms", "build_ms", "ratio", "noise")
    print(table(keys, [tuple(str(row[key]) for key in keys) for row in rows]))
    if options.json:
        record("load", head, rows)


if __name__ == "__main__":
    main()
