"""Compute the figures of goals from the records. The functions here return measures for goals."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from bench.check import recorded, slower
from bench.limits import Limits
from bench.results import lines_of, newest, of_processor, runs_of, timed

Row = dict[str, Any]


class Found(NamedTuple):
    text: str
    met: bool


Measure = Callable[["Records"], Found | None]


class Records:
    """The newest rows of each suite in ``folder``."""

    def __init__(self, folder: Path, cpu: str = "", gpu: str = "") -> None:
        """``cpu``: only that processor; ``gpu``: use products on a GPU whose name contains this."""
        self._folder, self._cpu, self._gpu = folder, cpu, gpu
        self._read: dict[str, list[Row]] = {}

    def on(self, gpu: str) -> Records:
        return Records(self._folder, gpu=gpu)

    def lines(self, suite: str) -> list[Row]:
        if suite not in self._read:
            lines = lines_of(self._folder / f"{suite}.jsonl")
            self._read[suite] = of_processor(lines, self._cpu) if self._cpu else lines
        return self._read[suite]

    def products(self, isa: str = "") -> list[Row]:
        return timed(newest(self._products(), isa))

    def _products(self) -> list[Row]:
        if not self._gpu:
            return self.lines("products")
        lines = self.lines("gpu-products")
        runs = {run for run, head in runs_of(lines).items() if self._gpu in head["gpu"]["device"]}
        return [line for line in lines if line["run"] in runs]

    def limits(self, row: Row) -> Row:
        """The limits from the run of ``row``; empty if they are unknown."""
        found = runs_of(self._products())[row["run"]]["limits"]
        return found if isinstance(found, dict) else {}

    def last(self, suite: str) -> list[Row]:
        """The rows of the newest run."""
        runs = list(runs_of(self.lines(suite)))
        return [line for line in self.lines(suite) if runs and line["run"] == runs[-1] and "machine" not in line]


def own(rows: Iterable[Row], schemes: tuple[str, ...], counts: tuple[int, int]) -> list[Row]:
    low, high = counts
    return [
        row for row in rows if row["peer"] == "bitport" and row["variant"] in schemes and low <= row["rows"] <= high
    ]


def place(row: Row) -> str:
    return f"{row['variant']} {row['k']}x{row['n']} at {row['rows']}"


def least(values: list[tuple[float, str]], bound: float, unit: str = "") -> Found | None:
    """The smallest of (value, where), with the median; met if it is at least ``bound``."""
    if not values:
        return None
    worst, where = min(values)
    middle = statistics.median(value for value, _ in values)
    return Found(f"{worst:.2f}{unit} ({where}); median {middle:.2f}{unit}", worst >= bound)


def most(values: list[tuple[float, str]], bound: float, unit: str = "") -> Found | None:
    """The same for values that should be small."""
    if not values:
        return None
    worst, where = max(values)
    middle = statistics.median(value for value, _ in values)
    return Found(f"{worst:.2f}{unit} ({where}); median {middle:.2f}{unit}", worst <= bound)


def over_bf16(schemes: tuple[str, ...], counts: tuple[int, int], bound: float) -> Measure:
    def measure(records: Records) -> Found | None:
        rows = own(records.products(), schemes, counts)
        return least([(row["speedup"], place(row) + _noise(row)) for row in rows if row["speedup"]], bound, "x")

    return measure


def _noise(row: Row) -> str:
    """Mention the noise if it is so large that the ratio alone would mislead."""
    noise = row.get("noise") or 0.0
    return f", its noise {100 * noise:.0f} %" if noise > 0.1 else ""


def of_bandwidth(name: str, schemes: tuple[str, ...], counts: tuple[int, int], bound: float) -> Measure:
    """The share of the bandwidth ("read", or "copy" on a GPU) at which a product moves the data it must. Bandwidth
    measured alongside the row takes precedence over that measured before the run."""

    def rate(row: Row) -> float:
        return (row["nbytes"] + 2 * row["rows"] * (row["n"] + row["k"])) / row["ms"] * 1e3

    return _of_limit(lambda row, found: row.get(name) or found.get(name), rate, schemes, counts, bound)


def of_peak(schemes: tuple[str, ...], counts: tuple[int, int], bound: float, *, int8: bool = False) -> Measure:
    """The share of the best unit's peak that a product reaches; only int8 inputs may use the int8 unit."""

    def rate(row: Row) -> float:
        return 2 * row["rows"] * row["n"] * row["k"] / row["ms"] * 1e3

    return _of_limit(lambda _, found: peak(found, int8) if found else None, rate, schemes, counts, bound)


def peak(found: Row, int8: bool) -> float:
    units = {name: rate for name, rate in found.items() if name != "read"}
    return Limits(found["read"], units).peak(int8)


def _of_limit(
    limit: Callable[[Row, Row], float | None],
    rate: Callable[[Row], float],
    schemes: tuple[str, ...],
    counts: tuple[int, int],
    bound: float,
) -> Measure:
    def measure(records: Records) -> Found | None:
        rows = [(row, limit(row, records.limits(row))) for row in own(records.products(), schemes, counts)]
        return least([(rate(row) / most, place(row)) for row, most in rows if most is not None], bound)

    return measure


def exactness(schemes: tuple[str, ...], counts: tuple[int, int], bound: float) -> Measure:
    def measure(records: Records) -> Found | None:
        return least([(row["sqnr_db"], place(row)) for row in own(records.products(), schemes, counts)], bound, " dB")

    return measure


AS_EXACT = 3.0
"""dB that a peer may lose more than bitport, twice its noise, and still be comparable: some reach their speed on an
instruction set by rounding inputs to fewer bits there."""


def over_peers(schemes: tuple[str, ...], isa: str = "") -> Measure:
    """Relative to the fastest other library of the same class that is as exact at each point, including torch's own
    products."""

    def measure(records: Records) -> Found | None:
        rows, values = records.products(isa), []
        for mine in own(rows, schemes, (1, 4096)):
            point = [row for row in rows if all(row[key] == mine[key] for key in ("run", "k", "n", "rows", "class"))]
            exact = [row for row in point if row["sqnr_db"] >= mine["sqnr_db"] - AS_EXACT]
            theirs = [row for row in exact if row["peer"] != "bitport"]
            best = min(theirs, key=lambda row: row["ms"], default=None)
            if best and best["speedup"] and mine["speedup"]:
                name = f"{place(mine)}, {best['peer']} {best['variant']}"
                values.append((mine["speedup"] / best["speedup"], name))
        found = least(values, 1.0, "x")
        behind = sum(value < 1 for value, _ in values)
        return found and found._replace(text=f"{behind} of {len(values)} points behind; {found.text}")

    return measure


def over_torch(isa: str) -> Measure:
    """Relative to the faster of bf16 and float32 under that restriction."""

    def measure(records: Records) -> Found | None:
        rows, values = records.products(isa), []
        for mine in own(rows, ("int4", "int4-int8", "int8-dyn"), (1, 4096)):
            point = [row for row in rows if all(row[key] == mine[key] for key in ("run", "k", "n", "rows"))]
            theirs = [row["speedup"] for row in point if row["class"] in ("bf16", "f32") and row["speedup"]]
            if theirs and mine["speedup"]:
                values.append((mine["speedup"] / max(theirs), place(mine)))
        return least(values, 1.0, "x")

    return measure


def checked(schemes: tuple[str, ...], base: str) -> Measure:
    """The result of ``make bench-check``."""

    def measure(records: Records) -> Found | None:
        rows = [row for row in recorded(records.lines("check"), "", base) if row["variant"] in schemes]
        if not rows:
            return None
        worst = min(rows, key=lambda row: row.get("speedup") or 0.0)
        bad = sum(slower(row) for row in rows)
        return Found(f"{bad} of {len(rows)} points; {worst.get('speedup') or 0:.2f}x ({place(worst)})", not bad)

    return measure


def overhead(records: Records) -> Found | None:
    """The newest record for the kernel of each scheme."""
    rows = {row["name"]: row for row in records.lines("overhead") if row.get("what") == "scheme"}
    return most([(row["ratio"], row["name"]) for row in rows.values()], 2.0, "x")


def quantizing(records: Records) -> Found | None:
    rows = [row for row in records.last("quantize") if row["library"] == "bitport" and "of_read" in row]
    return least([(row["of_read"], f"{row['scheme']} {row['k']}x{row['n']}") for row in rows], 0.5)


def quantizing_over_torchao(records: Records) -> Found | None:
    rows = {(row["library"], row["scheme"], row["k"], row["n"]): row["ms"] for row in records.last("quantize")}
    own = "bitport quantize_"
    values = [
        (theirs / rows[own, scheme, k, n], f"{scheme} {k}x{n}")
        for (library, scheme, k, n), theirs in rows.items()
        if library == "torchao" and (own, scheme, k, n) in rows
    ]
    return least(values, 1.0, "x")


def loading(records: Records) -> Found | None:
    rows = [row for row in records.last("load") if row["mode"] == "mmap"]
    return most([(row["ratio"], f"{row['model']} {row['scheme']}, {row['cache']} files") for row in rows], 1.1, "x")


def growing(records: Records) -> Found | None:
    """The steepest line; its interval must reach 1."""
    rows = [row for row in records.last("growth") if "exponent" in row and row["candidate"].startswith("bitport ")]
    if not rows:
        return None
    worst = max(rows, key=lambda row: row["exponent"] - row["error"])
    where = f"{worst['candidate']}, {worst['sweep']}"
    return Found(f"{worst['exponent']:.2f} ± {worst['error']:.2f} ({where})", worst["exponent"] - worst["error"] <= 1)


def algorithms(records: Records) -> Found | None:
    """The newest row of each shape. As exact: an error that is at most 1 % larger."""
    measured = [row for row in records.lines("algorithms") if row.get("algorithm") in ("hqq", "gptq", "awq")]
    rows = list({(row["algorithm"], row["k"], row["n"]): row for row in measured}.values())
    found = least([(row["speedup"], f"{row['algorithm']} {row['k']}x{row['n']}") for row in rows], 1.0, "x")
    worst = max((row["error"] / row["reference_error"] for row in rows), default=0.0)
    return found and Found(f"{found.text}; error {worst:.2f}x at most", found.met and worst <= 1.01)


def on_gpu(name: str, measure: Measure) -> Measure:
    """The same for products on a GPU."""
    return lambda records: measure(records.on(name))
