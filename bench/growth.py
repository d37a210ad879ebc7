"""How time grows with the size of the weight, for a few numbers of rows, and with the number of rows where products are
compute-bound. The exponent b of time = a * size ** b is fitted in logarithms; 1 is linear.

Every point is measured as in ``bench.products``, along with bf16.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

import torch

from bench import products
from bench.measure import busy, header, record
from bench.peers import BASE
from bench.plot import Line, chart
from bench.results import runs_of
from bench.suites import Shape
from bitport.report.text import markdown, table

SIDES = (1024, 1536, 2048, 3072, 4096, 6144, 8192)
"""Sides of square weights: 1 to 67 million elements."""
FEW = (1, 16, 375)
"""Numbers of rows for the growth with the weight."""
SHAPE = Shape(4096, 4096)
MANY = (256, 512, 1024, 2048, 4096)
"""Numbers of rows for the growth with rows, starting where a product is compute-bound."""
SCHEMES = ("int4", "int8-dyn")

T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306)
"""Student's t for 95 %, two-sided, with 1, 2, ... degrees of freedom."""

Row = dict[str, Any]


def fit(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(slope, half its 95 % interval) of the least-squares line through the logarithms."""
    if not 3 <= len(points) <= len(T95) + 2:
        raise ValueError(f"a line is fitted to 3 to {len(T95) + 2} points, not {len(points)}")
    xs, ys = ([math.log(value) for value in values] for values in zip(*points, strict=True))
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    square = sum((x - x_mean) ** 2 for x in xs)
    slope = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / square
    left = sum((y - y_mean - slope * (x - x_mean)) ** 2 for x, y in zip(xs, ys, strict=True))
    free = len(xs) - 2
    return slope, T95[free - 1] * math.sqrt(left / free / square)


def fits(points: list[Row]) -> list[Row]:
    """One fit for each sweep and candidate."""
    found = []
    for sweep, name in dict.fromkeys((row["sweep"], row["candidate"]) for row in points):
        line = [(row["size"], row["ms"]) for row in points if (row["sweep"], row["candidate"]) == (sweep, name)]
        slope, error = fit(line)
        found.append({"sweep": sweep, "candidate": name, "exponent": round(slope, 3), "error": round(error, 3)})
    return found


def points_of(rows: list[Row], sweep: str) -> list[Row]:
    """``sweep``: "rows", or what is fixed while the weight grows."""
    return [
        {
            "sweep": sweep,
            "candidate": f"{row['peer']} {row['variant']}",
            "size": row["rows"] if sweep == "rows" else row["k"] * row["n"],
            **{key: row[key] for key in ("k", "n", "rows", "ms")},
        }
        for row in rows
        if "ms" in row and (row["peer"], row["variant"]) in (BASE, *(("bitport", scheme) for scheme in SCHEMES))
    ]


def measure(sides: Sequence[int], few: Sequence[int], shape: Shape, many: Sequence[int], repetitions: int) -> list[Row]:
    options = products.Chosen((), (), SCHEMES, ("torch", "bitport"), repetitions, torch.get_num_threads(), "")
    unknown = "they do not matter here"
    weights = options._replace(shapes=tuple(Shape(side, side) for side in sides), rows=tuple(few))
    rows = products.measure(weights, unknown)
    points = [each for m in few for each in points_of([row for row in rows if row["rows"] == m], f"weight, {m} rows")]
    return points + points_of(products.measure(options._replace(shapes=(shape,), rows=tuple(many)), unknown), "rows")


def section(lines: list[Row], folder: str) -> tuple[str, dict[str, str]]:
    """(text, charts) of the newest run; both empty if there is none."""
    runs = runs_of(lines)
    if not runs:
        return "", {}
    run, head = list(runs.items())[-1]
    mine = [line for line in lines if line["run"] == run]
    points, fitted = [row for row in mine if "ms" in row], [row for row in mine if "exponent" in row]
    text = [
        "## Growth\n",
        "The exponent b of time = a * size ** b, with its 95 % interval: 1 is linear. First with the size of the",
        "weight (square, 1 to 67 million numbers) at a fixed number of rows, then with the number of rows.",
        f"Run {run}, commit {head['commit']}.\n",
        markdown(
            ("grows", "", "exponent"),
            [(row["sweep"], row["candidate"], f"{row['exponent']:.2f} ± {row['error']:.2f}") for row in fitted],
            words=(0, 1),
        ),
        "",
    ]
    charts = {}
    for sweep in dict.fromkeys(row["sweep"] for row in points):
        here = [row for row in points if row["sweep"] == sweep]
        drawn = [
            Line(name, [(row["size"], row["ms"]) for row in here if row["candidate"] == name], _kind(name))
            for name in dict.fromkeys(row["candidate"] for row in here)
        ]
        name = f"{folder}/growth-{sweep.replace(', ', '-').replace(' ', '-')}.svg"
        title = f"time against {'rows' if sweep == 'rows' else f'the numbers of a {sweep}'}"
        charts[name] = chart(title, "rows of x" if sweep == "rows" else "N * K", "ms", drawn)
        text.append(f"![{title}]({name})\n")
    return "\n".join(text), charts


def _kind(name: str) -> str:
    return "base" if name == " ".join(BASE) else "ours"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", type=int, default=list(SIDES), help="of square weights")
    parser.add_argument("--rows", nargs="+", type=int, default=list(MANY), help=f"that grow, at {SHAPE}")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="append to bench/results/growth.jsonl")
    options = parser.parse_args()
    head = header() | {"busy": busy()}
    points = measure(options.sides, FEW, SHAPE, options.rows, options.repetitions)
    fitted = fits(points)
    cells = [(row["sweep"], row["candidate"], f"{row['exponent']:.3f} +- {row['error']:.3f}") for row in fitted]
    print(f"\n{table(('grows', 'candidate', 'exponent'), cells)}")
    if options.json:
        record("growth", head, [*points, *fitted])


if __name__ == "__main__":
    main()
