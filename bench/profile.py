"""Break down the time of a product by activity of the native library, sampled with Linux's perf.

python -m bench.profile --points int4:3072x8192:1 int8-dyn:4096x4096:1500
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.measure import busy, header, record
from bench.suites import Shape
from bitport import quantize_
from bitport.report.text import table

Row = dict[str, Any]

SECONDS = 3.0
"""Sampling time in seconds for each point."""
BEYOND_L2 = 1 << 26
"""Size in bytes of the weights that are used in turn."""

PARTS = (
    ("products by tiles, the next panel decoded between them", "bitport", r"multiply"),
    ("codes to products at once", "bitport", r"fused|digits"),
    ("decoding by itself", "bitport", r"decode|look_up|unpack"),
    ("scales, results written", "bitport", r"stream|store|finish|settle|activate"),
    ("x laid out or rounded", "bitport", r"lay_out|laid_out|linear_of_floats|linear_int8|range|round|split|unit_of"),
    ("the rest of the kernels", "bitport", r""),
    ("threads that start or wait", "gomp", r""),
    ("the system: fresh pages", "kernel", r""),
    ("torch and Python", "", r""),
)
"""(part, substring of the library's path, pattern of the symbol); the first match applies."""

POINTS = (
    *(f"int4:3072x8192:{rows}" for rows in (1, 16, 375, 1500)),
    *(f"{scheme}:4096x4096:1500" for scheme in ("int4", "int8-dyn", "int4-int8")),
    *(f"{scheme}:1280x1280:1500" for scheme in ("int4", "int8")),
)


class Point(NamedTuple):
    variant: str
    shape: Shape
    rows: int

    @staticmethod
    def of(text: str) -> Point:
        found = re.fullmatch(r"([\w-]+):(\d+)x(\d+):(\d+)", text)
        if not found:
            raise argparse.ArgumentTypeError(f"{text!r} is not SCHEME:KxN:ROWS, such as int4:3072x8192:1")
        return Point(found[1], Shape(int(found[2]), int(found[3])), int(found[4]))

    def __str__(self) -> str:
        return f"{self.variant}:{self.shape}:{self.rows}"


def repeat(point: Point) -> None:
    """Run the product repeatedly, until this process is killed."""
    k, n = point.shape
    made = []
    for _ in range(max(1, min(8, BEYOND_L2 // (k * n)))):
        layer = torch.nn.Linear(k, n, bias=False, dtype=torch.bfloat16)
        quantize_(layer, point.variant)
        made.append(layer)
    x = torch.randn(point.rows, k).bfloat16()
    with torch.inference_mode():
        for layer in made:
            layer(x)
        print("ready", flush=True)
        while True:
            for layer in made:
                layer(x)


def part_of(symbol: str, library: str) -> str:
    return next(part for part, where, what in PARTS if where in library and re.search(what, symbol))


def shares(script: Iterable[str]) -> dict[str, float]:
    """Part -> its share of the samples, from lines of ``perf script -F ip,sym,dso``."""
    found = Counter(
        part_of(match[1], match[2]) for line in script if (match := re.match(r"\s*[0-9a-f]+ (.*) \((.*)\)$", line))
    )
    total = sum(found.values())
    return {part: round(found[part] / total, 3) for part, _, _ in PARTS if found[part]}


def profile(point: Point, threads: int) -> Row:
    command = [sys.executable, "-m", "bench.profile", "--repeat", str(point), "--threads", str(threads)]
    repeating = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert repeating.stdout is not None
        if repeating.stdout.readline().strip() != "ready":
            raise SystemExit(f"{point} could not be run: see above")
        time.sleep(0.2)
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder) / "samples"
            record = [
                "perf",
                "record",
                "-q",
                "-e",
                "cpu-clock",
                "-F",
                "1999",
                "-o",
                str(data),
                "-p",
                str(repeating.pid),
            ]
            subprocess.run([*record, "--", "sleep", str(SECONDS)], check=True, capture_output=True)
            read = ["perf", "script", "-i", str(data), "-F", "ip,sym,dso"]
            script = subprocess.run(read, check=True, capture_output=True, text=True).stdout
    finally:
        repeating.kill()
        repeating.wait()
    return {"k": point.shape.k, "n": point.shape.n, "rows": point.rows, "variant": point.variant} | {
        "shares": shares(script.splitlines())
    }


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--points", nargs="+", type=Point.of, default=[Point.of(each) for each in POINTS])
    made.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    made.add_argument("--json", action="store_true", help="append them to bench/results/profile.jsonl")
    made.add_argument("--repeat", type=Point.of, help=argparse.SUPPRESS)
    options = made.parse_args()
    torch.set_num_threads(options.threads)
    if options.repeat:
        repeat(options.repeat)
    if not shutil.which("perf"):
        sys.exit("perf is not there; Debian's package is linux-perf")
    head = header() | {"busy": busy()}
    rows = [profile(point, options.threads) for point in options.points]
    for point, row in zip(options.points, rows, strict=True):
        print(
            f"\n{point}\n{table(('part', 'share'), [(part, f'{share:.1%}') for part, share in row['shares'].items()])}"
        )
    if options.json:
        record("profile", head, rows)


if __name__ == "__main__":
    main()
