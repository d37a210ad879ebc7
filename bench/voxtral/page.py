"""Generate docs/performance-voxtral.md from the records of ``bench.voxtral``: ``python -m bench.voxtral.page``."""

from __future__ import annotations

from typing import Any

from bench.measure import RESULTS
from bench.page import DOCS
from bench.results import lines_of, runs_of
from bench.voxtral.__main__ import GOALS, METHODS, SUITE
from bench.voxtral.build import BASE, PREPACKED
from bitport.report.text import markdown, size

Row = dict[str, Any]
PAGE = "performance-voxtral.md"
RATIOS: dict[str, tuple[str, ...]] = {BASE: (), PREPACKED: ("x bf16",)}
"""Columns beside the figures of a baseline."""
FIGURES = ("program", "load, mapped", "load, resident", "load, cold", "first", "run", "run, p99")

INTRODUCTION = """# A program like Voxtral, without Python

An audio encoder, an embedding of tokens and a text decoder of Voxtral's shape with random weights, as a package of
bitport's export in `bitport-run`: bf16 against low-bit weights. `make bench-voxtral` measures, `make voxtral-page`
writes this page; nothing in it is typed by hand. How it is measured: [bench](../bench/README.md).

*bf16-prepacked* is bf16 as torch compiles it with freezing, its weights in the order of oneDNN's kernels.
*x bf16* is the time (or size) as a part of bf16's, in the same turn: below 1 is better. *load, mapped*: weights are
read when they are first used, so that what is loaded is code. *load, resident*: they are mapped while the method is
loaded, from the page cache; that takes many times as long where the system keeps a file in small pages as where it
found large ones. *load, cold*: they are read from the disk.
"""


def page(lines: list[Row]) -> str:
    """The page, from the newest run of each size."""
    heads: dict[str, Row] = {str(head["sizes"]): head for head in runs_of(lines).values()}
    text = [INTRODUCTION]
    for head in sorted(heads.values(), key=lambda each: -each["sizes"]["layers"]):
        text.append(section(head, [row for row in lines if row["run"] == head["run"] and "figure" in row]))
    return "\n".join(text).rstrip() + "\n"


def section(head: Row, rows: list[Row]) -> str:
    sizes, machine = head["sizes"], head["machine"]
    names = sorted(dict.fromkeys(row["candidate"] for row in rows), key=lambda name: name not in RATIOS)
    title = f"## {sizes['audio_layers']} layers of the encoder, {sizes['layers']} of the decoder\n"
    where = (
        f"Run {head['run']}, commit {head['commit']}: {machine['cpu']}, {head['runner_threads']} threads, "
        f"{sizes['frames']} positions of audio, a prompt of {sizes['frames'] // 4}; codes by {head['algorithm']}. "
        f"Other processes used {head['busy']} cores.\n"
    )
    columns = [cell for name in names for cell in (name, *RATIOS.get(name, ("x bf16", "goal")))]
    lines = [("size", *cells_of(names, [row for row in rows if row["figure"] == "size"], GOALS["size"]))]
    for method in METHODS:
        for figure in FIGURES:
            mine = [row for row in rows if row.get("method") == method and row["figure"] == figure]
            lines.append((f"{method}: {figure}", *cells_of(names, mine, goal_of(method, figure))))
    return "\n".join([title, where, markdown(("", *columns), lines), ""])


def goal_of(method: str, figure: str) -> float | None:
    if figure == "run":
        return GOALS.get(method, GOALS["run"])
    return GOALS["load"] if figure in ("load, resident", "load, cold") else None


def cells_of(names: list[str], rows: list[Row], goal: float | None) -> list[str]:
    found, cells = {row["candidate"]: row for row in rows}, []
    for name in names:
        beside = RATIOS.get(name, ("x bf16", "goal"))
        if name not in found:
            cells += [""] * (1 + len(beside))
            continue
        row = found[name]
        verdict = "" if goal is None else f"{goal} {'met' if row['ratio'] <= goal else 'MISSED'}"
        cells.append(size(row["nbytes"]) if "nbytes" in row else f"{row['ms']:.3f} ms")
        cells += [f"{row['ratio']:.3f}", verdict][: len(beside)]
    return cells


def main() -> None:
    lines = lines_of(RESULTS / f"{SUITE}.jsonl")
    if not lines:
        raise SystemExit("nothing was measured yet: make bench-voxtral")
    (DOCS / PAGE).write_text(page(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
