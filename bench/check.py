"""Check that every product of bitport is at least as fast as bf16; fails, and names the points, if one is slower beyond
noise.

bf16 and the schemes take turns: a pair is one turn of each, close in time, so its ratio (bf16's time over ours) is not
affected by drift of the machine. At a point whose first pairs have a median below 1, more are measured, in alternating
order. It fails only if so many of those are below 1 that a product as fast as bf16 would show this once in a thousand
times: a statement about the order of the ratios alone, whatever their distribution.

``--compiled`` compares with bf16 as computed by torch.compile with freezing: with the weight reordered for oneDNN.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from bench import products, suites
from bench.measure import RESULTS, append, busy, header
from bench.peers import BASE
from bench.products import Candidate, Field, Point
from bench.results import lines_of, runs_of
from bench.suites import Shape
from bench.workers import Flusher, ask
from bitport.report.text import table

Row = dict[str, Any]

ROWS = (1, 4, 16, 64, 128, 375, 1500, 4096)
SCHEMES = ("int4", "nf4", "mxfp4-wo", "int8", "fp8-wo", "int8-dyn", "int4-int8")
COMPILED = Candidate(BASE[0], "bf16 prepacked")

FIRST = 5
"""Initial pairs of a point; LEAST if a call takes longer than SLOW seconds."""
LEAST, SLOW = 3, 0.25
MORE = 21
"""Pairs of a point that looks slow; LEAST_MORE if these would take more than PATIENCE seconds."""
LEAST_MORE, PATIENCE = 11, 15.0
CHANCE = 1e-3
"""Probability that a product as fast as bf16 is called slow."""
WORST = 25
"""The number of points to print."""


def needed(pairs: int) -> int:
    """The number of ``pairs`` below 1 that shows that the median is: the smallest count that fair coins reach with at
    most the probability CHANCE, or more than ``pairs`` if there is none."""
    ways = 0
    for count in range(pairs, -1, -1):
        ways += math.comb(pairs, count)
        if ways / 2**pairs > CHANCE:
            return count + 1
    return 0


def slower(row: Row) -> bool:
    """Below 1.0x of bf16 by more than the noise, or not measured at all."""
    return row.get("speedup") is None or row["below"] >= needed(row["pairs"])


def judged(ratios: list[float]) -> Row:
    """``low`` and ``high`` are the quartiles."""
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    figures = {"speedup": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}
    return {**figures, "pairs": len(ratios), "below": sum(ratio < 1 for ratio in ratios)}


class Turns:
    """Runs turns at one shape: seconds per call of a candidate, with cold caches."""

    def __init__(self, point: Point, flush: Flusher) -> None:
        self.point, self.flush = point, flush
        self.lost: dict[Candidate, str] = {}

    def __call__(self, candidate: Candidate, m: int, fact: Row) -> float | None:
        self.flush()
        worker = self.point.field.workers[candidate.peer]
        taken, reason = ask(worker, "time", candidate.variant, m, fact["calls"])
        if reason:
            self.lost[candidate] = reason
            return None
        return statistics.median(taken)

    def first(self, base: Candidate, m: int, facts: dict[Candidate, Row]) -> dict[Candidate, list[float]]:
        """Ratios of every candidate: in each repetition base takes one turn, followed by all others."""
        ratios: dict[Candidate, list[float]] = {each: [] for each in facts if each.peer == "bitport"}
        for _ in range(LEAST if facts[base]["seconds"] > SLOW else FIRST):
            theirs = self(base, m, facts[base])
            for each, found in ratios.items():
                ours = self(each, m, facts[each])
                if ours is not None and theirs is not None:
                    found.append(theirs / ours)
        return ratios

    def more(self, base: Candidate, candidate: Candidate, m: int, facts: dict[Candidate, Row]) -> list[float]:
        """Ratios of more pairs of these two alone, alternating which goes first."""
        pair = sum(facts[each]["seconds"] * (1 + facts[each]["calls"]) for each in (base, candidate)) + 0.1
        found = []
        for at in range(max(LEAST_MORE, min(MORE, int(PATIENCE / pair)))):
            order = (base, candidate) if at % 2 else (candidate, base)
            seconds = {each: self(each, m, facts[each]) for each in order}
            ours, theirs = seconds[candidate], seconds[base]
            if ours is not None and theirs is not None:
                found.append(theirs / ours)
        return found


def check_shape(field: Field, shape: Shape, base: Candidate, flush: Flusher) -> Iterator[Row]:
    point = Point(field, shape)
    turns = Turns(point, flush)
    for m in field.chosen.rows:
        facts = point.judge(m)
        if base not in facts:
            raise SystemExit(f"nothing to compare with: {base} failed at {shape}, {m} rows: {point.refused}")
        for candidate, ratios in turns.first(base, m, facts).items():
            if len(ratios) >= LEAST and statistics.median(ratios) < 1:
                ratios = turns.more(base, candidate, m, facts)
            found = {"k": shape.k, "n": shape.n, "rows": m, "variant": candidate.variant}
            if len(ratios) < LEAST:
                yield {**found, "reason": turns.lost.get(candidate, "it failed while it was timed")}
            else:
                yield {**found, **judged(ratios), "note": facts[candidate]["note"]}
    yield from (
        {key: row[key] for key in ("k", "n", "rows", "variant", "reason")}
        for row in point.refused
        if row["peer"] == "bitport"
    )


def measure(chosen: products.Chosen, base: Candidate, run: Row | None = None) -> list[Row]:
    """Measure all points; append them to the results shape by shape if ``run`` is the header that they belong to."""
    field, flush, rows = Field(chosen), Flusher(), []
    field.classes = {each: kind for each, kind in field.classes.items() if each == base or each.peer == "bitport"}
    try:
        if "bitport" in field.missing:
            raise SystemExit(f"nothing to check: {field.missing['bitport']}")
        if run is not None:
            append("check", [run | {"isa": chosen.isa, "base": base.variant, "busy": busy()}])
        for shape in chosen.shapes:
            start, before = time.monotonic(), busy() or 0.0
            fresh = list(check_shape(field, shape, base, flush))
            rows += fresh
            slow, others = sum(slower(row) for row in fresh), max(before, busy() or 0.0)
            print(f"{shape}: {len(fresh)} points, {slow} slower, {time.monotonic() - start:.0f} s", flush=True)
            if others > products.QUIET:
                print(f"careful: other processes use {others:.1f} cores, which tells against what uses all of them")
            if run is not None:
                append("check", [{"run": run["run"], **row} for row in fresh])
        return rows
    finally:
        field.close()


def recorded(lines: Iterable[Row], isa: str, base: str) -> list[Row]:
    """The points of the newest run against ``base`` under that restriction."""
    lines = list(lines)
    runs = [run for run, head in runs_of(lines).items() if (head["isa"], head["base"]) == (isa, base)]
    return [line for line in lines if runs and line["run"] == runs[-1] and "machine" not in line]


def worst_first(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (not slower(row), row.get("speedup") or 0.0))


def told(rows: list[Row]) -> str:
    """Every failed point, the worst others, and the verdict; for rows in the order of ``worst_first``."""
    bad = sum(slower(row) for row in rows)
    titles = ("shape", "rows", "scheme", "kernel", "x bf16", "quartiles", "below 1", "")
    shown = table(titles, [_cells(row) for row in rows[: max(bad, WORST)]])
    verdict = f"{bad} of {len(rows)} points are slower than bf16 by more than the noise" if bad else ""
    return f"{shown}\n\n{verdict or f'all {len(rows)} points are level with bf16 or faster'}"


def _cells(row: Row) -> tuple[str, ...]:
    where = (f"{row['k']}x{row['n']}", str(row["rows"] or "any"), row["variant"])
    if row.get("speedup") is None:
        return (*where, "", "-", "-", "-", row.get("reason", "not compared"))
    quartiles = f"{row['low']:.2f} to {row['high']:.2f}"
    pairs = f"{row['below']} of {row['pairs']}"
    return (*where, row["note"], f"{row['speedup']:.2f}", quartiles, pairs, "slower" if slower(row) else "")


def main() -> None:
    made = products.parser(__doc__)
    made.add_argument("--compiled", action="store_true", help="against bf16 compiled with freezing")
    made.add_argument("--json", action="store_true", help="append the points to bench/results/check.jsonl")
    made.add_argument("--recorded", action="store_true", help="look at the newest recorded run, measure nothing")
    options = made.parse_args()
    base = COMPILED if options.compiled else Candidate(*BASE)
    if options.recorded:
        rows = recorded(lines_of(RESULTS / "check.jsonl"), options.isa, base.variant)
    else:
        chosen = products.chosen_of(options)
        chosen = chosen._replace(
            peers=("torch", "bitport"),
            rows=tuple(options.rows or (suites.QUICK_ROWS if options.quick else ROWS)),
            schemes=tuple(options.schemes or (suites.QUICK_SCHEMES if options.quick else SCHEMES)),
        )
        products.restrict(chosen)
        rows = measure(chosen, base, header() if options.json else None)
    if not rows:
        sys.exit("no points of bitport to check")
    print(f"\n{told(worst_first(rows))}")
    sys.exit(any(slower(row) for row in rows))


if __name__ == "__main__":
    main()
