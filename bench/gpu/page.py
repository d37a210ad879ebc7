"""Generate the page of GPU figures: ``python -m bench.gpu.page`` writes docs/performance-gpu.md and its charts from the
records of ``bench.gpu.products`` and ``bench.gpu.methods``. Without records there is no page."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench import goals
from bench.gpu import methods, products
from bench.measure import RESULTS, state_of
from bench.page import DOCS, Row, libraries, section, write
from bench.reached import Records
from bench.results import lines_of, newest, runs_of
from bench.suites import SUITES, Shape
from bitport.report.text import markdown

GROUPS = {
    "4-bit": ("4-bit",),
    "4-bit weight, 8-bit input": ("4-bit x int8", "4-bit x fp8"),
    "8-bit": ("8-bit",),
    "8-bit weight, int8 input": ("8-bit x int8",),
    "8-bit weight, float8 input": ("8-bit x fp8", "8-bit x mxfp8"),
    "4-bit weight, 4-bit input": ("4-bit x nvfp4", "4-bit x mxfp4"),
    "2, 3, 5 and 6 bits": ("2-bit", "3-bit", "5-bit", "6-bit"),
}
"""Title of a chart and table -> the classes in it."""

INTRODUCTION = """# Performance on GPUs

How fast quantized weights are on the devices named, against bf16 by the device's own library: `F.linear` by itself, and
the methods of a program. `make gpu PIECES="products methods"` measures, `make gpu-page` writes this page; nothing in it
is typed by hand. How it is measured: [bench](../bench/README.md). What was checked on which device:
[support](support.md).
"""
ABOUT_PRODUCTS = """
In the tables: times as fast as bf16 in the same repetition (median), and the SQNR in dB against the float64 product
with the weight that the candidate effectively uses. *Best peer* is the fastest other library of the same class. *Limit*
is what the device could do at best: everything moved once at the speed of a copy, or all products done as fast as the
largest product of its library, whichever takes longer, for the first scheme of the table.
"""
NO_PRODUCTS = """
`F.linear` by itself, beside other libraries, has not been recorded on any device yet.
"""
OF_METHODS = """\
Its layers have the shapes of Voxtral's, its weights are random, and each method is one graph. *x bf16*: times as fast
as bf16; **below 1 it is slower**. *MB*: the weights that a method reads.
"""


def page(lines: list[Row], programs: list[Row], folder: str = "performance-gpu") -> dict[str, str]:
    """File name -> content: the newest run of each device and shape, and the last run of the program."""
    files: dict[str, str] = {}
    text = [INTRODUCTION + (ABOUT_PRODUCTS if lines else NO_PRODUCTS)]
    for device, mine in by_device(lines).items():
        rows, heads = newest(mine), runs_of(mine)
        text += [f"## {device}\n", *(about(heads[run]) for run in dict.fromkeys(row["run"] for row in rows))]
        if goals.of_device(device):
            text.append(goals.section(Records(RESULTS), device).replace("## Goals", "### Goals"))
        for suite in (*SUITES, "other"):
            for shape in dict.fromkeys(Shape(row["k"], row["n"]) for row in rows if row["suite"] == suite):
                here = [row for row in rows if Shape(row["k"], row["n"]) == shape]
                title = f"{suite}: {shape}"
                place = f"{folder}/{slug(device)}-{slug(title)}"
                names = {group: f"{place}-{slug(classes[0])}.svg" for group, classes in GROUPS.items()}
                text += section(f"### {title}", title, here, GROUPS, names, files)
    for device, mine in by_device(programs).items():
        head = list(runs_of(mine).values())[-1]
        rows = [line for line in mine if line["run"] == head["run"] and "machine" not in line]
        text += [f"## A program like Voxtral on {device}\n", of_methods(head, rows)]
    return {f"{folder}.md": "\n".join(text).rstrip() + "\n", **files}


def by_device(lines: list[Row]) -> dict[str, list[Row]]:
    """Device -> headers and rows of its runs."""
    heads = runs_of(lines)
    found: dict[str, list[Row]] = {}
    for line in lines:
        found.setdefault(heads[line["run"]]["gpu"]["device"], []).append(line)
    return found


def about(head: Row) -> str:
    limits, gpu = head["limits"], head["gpu"]
    units = ", ".join(f"{name} {limits[name] / 1e12:.0f}" for name in ("bf16", "int8", "float8") if limits.get(name))
    device = f"{gpu['device']} ({gpu['capability']}, toolkit {gpu['toolkit']})"
    return (
        f"- Run {head['run']}, {state(head)}: {device}. Memory is copied at {limits['copy'] / 1e9:.0f} GB/s; "
        f"10^12 operations per second: {units}. {libraries(head)}\n"
    )


def of_methods(head: Row, rows: list[Row]) -> str:
    cells = [
        (row["method"], row["candidate"], f"{row['ms']:.3f}", f"{row['speedup']:.2f}", f"{row['nbytes'] / 1e6:.0f}")
        for row in rows
        if "reason" not in row
    ]
    shown = markdown(("method", "weights", "ms", "x bf16", "MB"), cells, words=(0, 1))
    lost = [f"- not measured: {row['candidate']}: {row['reason']}" for row in rows if "reason" in row]
    where = f"Run {head['run']}, {state(head)}.\n"
    return "\n".join([OF_METHODS, where, shown, "", *lost, ""])


def state(head: Row) -> str:
    return state_of(head["commit"], "src/bitport/backends/triton", "src/bitport/backends/cuda")


def slug(text: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in text.lower()).strip("-")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=DOCS, help="folder (default: docs)")
    options = parser.parse_args()
    lines, programs = (lines_of(RESULTS / f"{suite}.jsonl") for suite in (products.SUITE, methods.SUITE))
    if not lines and not programs:
        parser.error("no GPU was measured yet: run make gpu PIECES=quick on a machine that has one, and make gpu-bring")
    write(page(lines, programs), options.output)


if __name__ == "__main__":
    main()
