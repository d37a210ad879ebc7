"""Read the records of runs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def lines_of(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def runs_of(lines: Iterable[Row]) -> dict[str, Row]:
    """Run -> its header, in the order of the file."""
    return {line["run"]: line for line in lines if "machine" in line}


def processors(lines: Iterable[Row]) -> list[str]:
    """The names of measured processors, in the order of the file."""
    return list(dict.fromkeys(line["machine"]["cpu"] for line in lines if "machine" in line))


def of_processor(lines: Iterable[Row], name: str) -> list[Row]:
    """The lines for one processor. A line without a run header names its machine itself."""
    lines = list(lines)
    runs = {line.get("run"): line for line in lines if "machine" in line}
    return [line for line in lines if (line if "machine" in line else runs[line["run"]])["machine"]["cpu"] == name]


def newest(lines: Iterable[Row], isa: str = "") -> list[Row]:
    """For each shape, the rows of the last run that measured it under that restriction, so that the points of a line
    belong to one run. A run with fewer peers does not replace one with more."""
    lines = list(lines)
    runs = runs_of(lines)
    by_shape: dict[tuple[int, int], dict[str, list[Row]]] = {}
    for line in lines:
        if "machine" not in line and runs[line["run"]].get("isa", "") == isa:
            by_shape.setdefault((line["k"], line["n"]), {}).setdefault(line["run"], []).append(line)
    kept: list[Row] = []
    for found in by_shape.values():
        best = max(found, key=lambda run: (len({row["peer"] for row in found[run] if "ms" in row}), run))
        kept += found[best]
    return kept


def timed(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if "ms" in row]
