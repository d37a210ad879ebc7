"""Generate the documentation pages about speed: ``python -m bench.page`` writes docs/performance.md, a similar page for
each other measured processor, and their charts, from the records in bench/results."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from bench import goals, growth
from bench.measure import RESULTS, state_of
from bench.peers import BASE
from bench.plot import Line, chart
from bench.reached import Records
from bench.results import lines_of, newest, processors, runs_of, timed
from bench.suites import SCHEMES, SUITES, Shape
from bitport.report.text import markdown

Row = dict[str, Any]
DOCS = Path(__file__).parents[1] / "docs"

GROUPS = {
    "4-bit": ("4-bit",),
    "4-bit weight, int8 input": ("4-bit x int8",),
    "8-bit": ("8-bit",),
    "8-bit weight, int8 input": ("8-bit x int8",),
    "8-bit weight, float8 input": ("8-bit x fp8", "8-bit x mxfp8"),
    "4-bit weight, float4 input": ("4-bit x mxfp4",),
    "2, 3, 5 and 6 bits": ("2-bit", "3-bit", "5-bit", "6-bit"),
}
"""Title of a chart and table -> the classes in it."""

INTRODUCTION = """# Performance on {cpu}

How fast `F.linear` with a quantized weight is, against bf16 and against other libraries, on one CPU{others}. GPUs have
[a page of their own](performance-gpu.md). `make bench-peers` measures, `make bench-page` writes this page; nothing in
it is typed by hand. How it is measured: [bench](../bench/README.md).

In the tables:

- a figure says how many times as fast as bf16 eager it was in the same repetition (median), and in brackets the SQNR in
  dB against the float64 product with the weight that the candidate effectively uses: what its kernel loses;
- *prepacked* is bf16 as `torch.compile` with freezing computes it;
- *best peer* is the fastest other library of the same class: as many bits per weight, inputs as they are or rounded to
  int8;
- *limit* is what the machine could do at best: everything read from memory once, or all products done by its best
  multiply unit, whichever takes longer, for the first scheme of the table.

What was measured:
"""


def pages(folder: Path) -> dict[str, str]:
    """File name -> content. The first measured processor gets the page without a name."""
    cpus = processors(lines_of(folder / "products.jsonl"))
    names = {cpu: f"performance-{_slug(cpu)}" if at else "performance" for at, cpu in enumerate(cpus)}
    files = {}
    for cpu, name in names.items():
        links = [f"[{other}]({names[other]}.md)" for other in cpus if other != cpu]
        files |= page(Records(folder, cpu), name, f" (others: {', '.join(links)})" if links else "", cpu)
    return files


def _slug(cpu: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", cpu.lower()).strip("-.")


def page(records: Records, folder: str = "performance", others: str = "", cpu: str = "one machine") -> dict[str, str]:
    """File name -> content, for the newest rows of every suite. ``folder``: of its charts, and the name of the page."""
    lines = records.lines("products")
    rows = newest(lines)
    files: dict[str, str] = {}
    text = [INTRODUCTION.format(cpu=cpu, others=others), _machines(rows, runs_of(lines)), goals.section(records)]
    for suite in (*SUITES, "other"):
        mine = [row for row in rows if row["suite"] == suite]
        shapes = dict.fromkeys(Shape(row["k"], row["n"]) for row in mine)
        for shape in shapes:
            here = [row for row in mine if Shape(row["k"], row["n"]) == shape]
            names = {title: f"{folder}/{shape}-{'-'.join(GROUPS[title]).replace(' ', '')}.svg" for title in GROUPS}
            text += section(f"## {suite}: {shape}", f"{suite} {shape}", here, GROUPS, names, files)
    growing, drawn = growth.section(records.lines("growth"), folder)
    files |= drawn
    text += [generation(records.lines("generate")), growing, _refusals(rows)]
    return {f"{folder}.md": "\n".join(text).rstrip() + "\n", **files}


def section(
    head: str,
    title: str,
    here: list[Row],
    groups: dict[str, tuple[str, ...]],
    names: dict[str, str],
    files: dict[str, str],
) -> list[str]:
    """A chart and a table for each of ``groups`` that bitport was measured in, under ``head``. The chart, with a
    ``title``, goes to ``files`` under the name that the group has in ``names``."""
    text: list[str] = []
    base = [row for row in timed(here) if row["class"] == "bf16"]
    for group, classes in groups.items():
        mine = [row for row in timed(here) if row["class"] in classes]
        if any(row["peer"] == "bitport" for row in mine):
            files[names[group]] = chart(f"{title}, {group}", "rows of x", "ms", chart_lines(base, mine))
            text += [f"**{group}**\n", f"![time against rows]({names[group]})\n", table(base, mine), ""]
    return [f"{head} (in x out)\n", *text] if text else []


def generation(lines: list[Row]) -> str:
    """A table for each run, except those whose model and candidates are covered by a later one."""
    heads = [line for line in lines if "machine" in line]
    measured = [[line for line in lines if line["run"] == head["run"] and "candidate" in line] for head in heads]
    names = [{(head["model"], row["candidate"]) for row in rows} for head, rows in zip(heads, measured, strict=True)]
    text = []
    for at, (head, rows) in enumerate(zip(heads, measured, strict=True)):
        if any(names[at] <= later for later in names[at + 1 :]):
            continue
        text += [
            f"## Generation: {head['model']}\n",
            f"A prompt of {head['prompt']} tokens, then {head['tokens']} tokens one by one; speedups over the first "
            f"line. Run {head['run']}, commit {head['commit']}: {head['machine']['cpu']}, "
            f"{head['machine']['threads']} threads.\n",
            markdown(
                ("", "prompt ms", "speedup", "tokens/s", "speedup"),
                [_generated(row) for row in rows if "reason" not in row],
            ),
            "",
            *(
                f"- not measured: {row['candidate']}: {row['reason'].splitlines()[0]}"
                for row in rows
                if "reason" in row
            ),
            "",
        ]
    return "\n".join(text)


def _generated(row: Row) -> list[str]:
    figures = (row["prompt_ms"], row["prompt_speedup"], row["tokens_per_second"], row["speedup"])
    return [row["candidate"], *(f"{figure:.2f}" for figure in figures)]


def chart_lines(base: list[Row], group: list[Row]) -> list[Line]:
    """Lines for bf16, bitport and peers, and the limit of the first scheme."""
    drawn = []
    for row_kind, rows in (("base", base), ("group", group)):
        for name in _candidates(rows):
            points = [(row["rows"], row["ms"]) for row in rows if _name(row) == name]
            kind = "ours" if name.startswith("bitport ") else "peer"
            drawn.append(Line(name, points, "base" if row_kind == "base" and name == " ".join(BASE) else kind))
    first = _candidates(group)[0]
    limits = [(row["rows"], row["floor_ms"]) for row in group if _name(row) == first and "floor_ms" in row]
    return [*drawn, Line("limit", limits, "limit")]


def table(base: list[Row], group: list[Row]) -> str:
    own = [name for name in _candidates(group) if name.startswith("bitport ")]
    at = {(row["rows"], _name(row)): row for row in (*base, *group)}
    counts = sorted({row["rows"] for row in group})
    header = ["rows", "bf16 ms", "prepacked", *(name.removeprefix("bitport ") for name in own), "best peer", "limit"]
    lines = []
    for m in counts:
        bf16 = at.get((m, " ".join(BASE)))
        peers = [row for row in group if row["rows"] == m and row["peer"] != "bitport" and row["speedup"]]
        best = max(peers, key=lambda row: row["speedup"], default=None)
        first = at.get((m, own[0]), {})
        limit = f"{bf16['ms'] / first['floor_ms']:.1f}" if bf16 and "floor_ms" in first else "-"
        lines.append(
            [
                str(m),
                f"{bf16['ms']:.3g}" if bf16 else "-",
                _speed(at.get((m, f"{BASE[0]} bf16 prepacked"))),
                *(_speed(at.get((m, name)), exact=True) for name in own),
                f"{_speed(best, exact=True)} {_name(best)}" if best else "-",
                limit,
            ]
        )
    return markdown(header, lines, words=(header.index("best peer"),))


def _candidates(rows: list[Row]) -> list[str]:
    """The names of candidates: bitport's first, in the order of the schemes."""
    names = dict.fromkeys(_name(row) for row in rows)
    order = {f"bitport {scheme}": at for at, scheme in enumerate(SCHEMES)}
    return sorted(names, key=lambda name: order.get(name, len(order)))


def _name(row: Row) -> str:
    return f"{row['peer']} {row['variant']}"


def _speed(row: Row | None, exact: bool = False) -> str:
    if row is None or row.get("speedup") is None:
        return "-"
    return f"{row['speedup']:.2f}" + (f" ({row['sqnr_db']:.0f} dB)" if exact else "")


def _machines(rows: list[Row], runs: dict[str, Row]) -> str:
    text = []
    for run in dict.fromkeys(row["run"] for row in rows):
        head = runs[run]
        machine, found = head["machine"], head["limits"]
        if isinstance(found, dict):
            units = ", ".join(f"{name} {rate / 1e12:.2f}" for name, rate in found.items() if name != "read")
            found = f"memory is read at {found['read'] / 1e9:.1f} GB/s; 10^12 operations per second: {units}"
        where = f"{machine['cpu']}, {machine['threads']} threads"
        state = state_of(head["commit"], "native/kernels")
        text.append(f"- Run {run}, {state}: {where}. {found}. {libraries(head)}")
    return "\n".join(text) + "\n"


def libraries(head: Row) -> str:
    """The versions of those that a run had, and why it was without others."""
    versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
    missing = "".join(f"\n  - without {name}: {why.splitlines()[0]}" for name, why in head["missing"].items())
    return f"{versions}.{missing}"


def _refusals(rows: list[Row]) -> str:
    """Each reason once, with the points that it applies to."""
    where: dict[str, list[str]] = {}
    for row in rows:
        if "reason" in row:
            at = f"{row['k']}x{row['n']}" + (f" at {row['rows']} rows" if row["rows"] else "")
            where.setdefault(f"{_name(row)}: {row['reason'].splitlines()[0][:160]}", []).append(at)
    lines = [f"- {what} ({at[0]}{f' and {len(at) - 1} more' if len(at) > 1 else ''})" for what, at in where.items()]
    return "\n".join(["## Not measured\n", *lines]) if lines else ""


def write(files: dict[str, str], folder: Path) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=DOCS, help="folder (default: docs)")
    options = parser.parse_args()
    files = pages(RESULTS)
    if not files:
        parser.error(f"{RESULTS.name} has no products yet: run make bench-peers first")
    write(files, options.output)
    for drawn in options.output.glob("performance*/*.svg"):
        if str(drawn.relative_to(options.output)) not in files:
            drawn.unlink()


if __name__ == "__main__":
    main()
