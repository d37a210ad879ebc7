"""``python -m bitport.conformance``: run the suite on a device, save the result, print the support matrix."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bitport.conformance.matrix import support_table
from bitport.conformance.suite import Row, never_chosen, never_used, run
from bitport.errors import BitportError
from bitport.ops import OPS
from bitport.ops.outside import outside
from bitport.report.text import table
from bitport.report.versions import library_version


def main(argv: list[str] | None = None) -> int:
    """Return 0 if every sample passed, 1 if some did not or an argument was wrong."""
    options = _parser().parse_args(argv)
    if options.table is not None:
        print(support_table(json.loads(options.table.read_text())), end="")
        return 0
    try:
        rows = run(options.device, options.ops)
    except (BitportError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join([_summary(rows), *never_chosen(options.device, rows), *never_used(options.device)]))
    print("".join(f"{line}\n" for line in _failures(rows)), end="", file=sys.stderr)
    if options.json is not None:
        keep(options.json, options.device, rows, options.ops or ())
    return 0 if all(row.passed for row in rows) else 1


def keep(path: Path, device: str, rows: list[Row], ops: Sequence[str] = ()) -> None:
    """Save the run on ``device`` in the file at ``path``, next to the runs on other devices. A run of only some ``ops``
    is merged into the device's previous run if the versions are the same."""
    runs = json.loads(path.read_text()) if path.exists() else {}
    place = outside(device)
    name = torch.device(device).type if place is None else place.name
    made: dict[str, Any] = {
        "bitport": library_version(),
        "torch": torch.__version__ if place is None else f"{torch.__version__}, {place.library}",
        "rows": [_jsonable(dataclasses.asdict(row)) for row in rows],
    }
    before = runs.get(name, {})
    if ops and all(before.get(of) == made[of] for of in ("bitport", "torch")):
        found = [*(row for row in before["rows"] if row["op"] not in ops), *made["rows"]]
        made["rows"] = sorted(found, key=lambda row: list(OPS).index(row["op"]))
    runs[name] = made
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(runs, indent=1, sort_keys=True) + "\n")


def _jsonable(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: None stands for an exact result. SQNR and margin are rounded to 0.1 dB."""
    for key in ("sqnr", "margin"):
        row[key] = None if row[key] == math.inf else "failed" if row[key] == -math.inf else round(row[key], 1)
    return row


def _failures(rows: list[Row]) -> list[str]:
    """Return one line per failure, or per reason that several samples of an op share."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for failure in row.failures:
            found.setdefault((row.op, failure.partition(": ")[2]), []).append(f"FAILED {row.op} {row.dtype} {failure}")
    return [first + (f"; {len(others)} others alike" if others else "") for first, *others in found.values()]


def _summary(rows: list[Row]) -> str:
    """Return one line per op and dtype, and one per reason why samples were refused."""
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        lines.setdefault((row.op, row.dtype), []).append(row)
    body = []
    for (op, dtype), group in lines.items():
        samples, failed = sum(row.samples for row in group), sum(len(row.failures) for row in group)
        margin = min(row.margin for row in group)
        kernels = ", ".join(dict.fromkeys(kernel for row in group for kernel in row.kernels))
        least = f"{margin:+.1f} dB" if margin != math.inf else "exact" if samples else ""
        body.append((op, dtype, samples, failed, least, kernels))
    reasons = Counter(f"{row.op}: {line.partition(': ')[2]}" for row in rows for line in row.refused)
    refused = [f"refused {count} samples of {reason}" for reason, count in reasons.items()]
    return "\n".join([table(("op", "dtype", "samples", "failed", "least margin", "kernels"), body), *refused])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bitport.conformance",
        description="Try every op of bitport on a device and compare with float64.",
        epilog="example: python -m bitport.conformance --device xpu --json docs/support.json",
    )
    parser.add_argument(
        "--device", default="cpu", help="cpu, cuda, xpu, jax (torchax), or any device an installed package adds"
    )
    parser.add_argument("--ops", nargs="+", choices=list(OPS), metavar="OP", help="only these ops")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the result in FILE, beside other devices'")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the matrix of the runs in FILE; run nothing")
    return parser
