"""Is every product of bitport at least as fast as bf16? Fails where one is slower by more than the noise of its run.

Measures the suite with bitport and bf16 alone; ``--recorded`` looks at bench/results/products.jsonl instead.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from bench import products
from bench.results import PRODUCTS, lines_of, newest
from bitport.report.text import table

Row = dict[str, Any]
WORST = 25
"""How many points are printed."""


def slower(row: Row) -> bool:
    """Below 1.0x of bf16 by more than the noise; a point that could not be measured is no better."""
    return row.get("speedup") is None or row["speedup"] * (1 + (row["noise"] or 0.0)) < 1.0


def own(rows: Iterable[Row]) -> list[Row]:
    """bitport's points, the worst first."""
    return sorted((row for row in rows if row["peer"] == "bitport"), key=lambda row: row.get("speedup") or 0.0)


def told(rows: list[Row]) -> str:
    """The worst points and the verdict, for rows in the order of ``own``."""
    bad = [row for row in rows if slower(row)]
    shown = table(("shape", "rows", "scheme", "kernel", "x bf16", "noise", ""), [_cells(row) for row in rows[:WORST]])
    verdict = f"{len(bad)} of {len(rows)} points are slower than bf16 by more than the noise" if bad else ""
    return f"{shown}\n\n{verdict or f'all {len(rows)} points are level with bf16 or faster'}"


def _cells(row: Row) -> tuple[str, ...]:
    shape = f"{row['k']}x{row['n']}"
    if row.get("speedup") is None:
        return (shape, str(row["rows"] or "any"), row["variant"], "", "-", "-", row.get("reason", "not compared"))
    noise = "-" if row["noise"] is None else f"{100 * row['noise']:.0f} %"
    mark = "slower" if slower(row) else ""
    return (shape, str(row["rows"]), row["variant"], row["note"], f"{row['speedup']:.2f}", noise, mark)


def main() -> None:
    made = products.parser(__doc__)
    made.add_argument("--recorded", action="store_true", help="look at the newest recorded rows, measure nothing")
    options = made.parse_args()
    if options.recorded:
        rows = own(newest(lines_of(PRODUCTS), options.isa))
    else:
        chosen = products.chosen_of(options)._replace(peers=("torch", "bitport"))
        rows = own(products.measure(chosen, products.prepare_machine(chosen)))
    if not rows:
        sys.exit("no points of bitport to check")
    print(f"\n{told(rows)}")
    sys.exit(any(slower(row) for row in rows))


if __name__ == "__main__":
    main()
