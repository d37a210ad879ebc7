"""Import measurements from elsewhere: ``python -m bench.gpu.bring FOLDER`` appends new records from a folder, installs
a measured table where tables are shipped, and adds the conformance results to those of other devices. A table is
rejected if it has no record or no blocks; some kinds of weights may be unmeasured.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.measure import RESULTS, append
from bench.page import DOCS
from bench.results import lines_of
from bitport.backends.triton import configs, measure
from bitport.conformance.matrix import support_table

PREFIX = "triton-"
"""Prefix of tables that tune writes, before the architecture."""


def records(folder: Path) -> list[str]:
    """Append new records; returns a message for each suite."""
    said: list[str] = []
    for file in sorted(folder.glob("*.jsonl")):
        here = {json.dumps(line) for line in lines_of(RESULTS / file.name)}
        fresh = [line for line in lines_of(file) if json.dumps(line) not in here]
        if fresh:
            append(file.stem, fresh)
        said.append(f"{file.stem}: {len(fresh)} lines")
    return said


def tables(folder: Path, shipped: Path = configs.FOLDER) -> list[str]:
    said: list[str] = []
    recorded = {line.get("source") for line in lines_of(RESULTS / "gpu-tune.jsonl")}
    for file in sorted(folder.glob(f"{PREFIX}*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        name = file.stem.removeprefix(PREFIX)
        if reason := wrong(content, recorded):
            said.append(f"table of {name} stays out: {reason}")
            continue
        measure.for_others(content)
        (shipped / f"{name}.json").write_text(as_text(content), encoding="utf-8")
        said.append(f"table of {name}: {content['source']}")
    return said


def wrong(content: Any, recorded: set[str | None]) -> str | None:
    if reason := configs.fault(content):
        return reason
    if left := [stage for stage in content.get("unmeasured", []) if not stage.startswith("rows ")]:
        return f"it was stopped before {', '.join(left)}"
    return None if content["source"] in recorded else f"no record of a run says {content['source']!r}"


def support(folder: Path, docs: Path = DOCS) -> list[str]:
    file = folder / "support.json"
    if not file.exists():
        return []
    every = json.loads((docs / file.name).read_text(encoding="utf-8"))
    fresh = {device: run for device, run in json.loads(file.read_text(encoding="utf-8")).items() if device != "cpu"}
    text = json.dumps({**every, **fresh}, indent=1, sort_keys=True) + "\n"
    (docs / file.name).write_text(text, encoding="utf-8")
    (docs / "support.md").write_text(support_table(json.loads(text)), encoding="utf-8")
    return [f"conformance: {', '.join(fresh) or 'no other device'}"]


def as_text(content: dict[str, Any]) -> str:
    """JSON with one line per list entry, or per entry of the table itself."""
    lines = []
    for name, value in content.items():
        entries = value if isinstance(value, list) else None
        text = (
            "[\n" + ",\n".join(f"    {json.dumps(each)}" for each in entries) + "\n  ]"
            if entries
            else json.dumps(value)
        )
        lines.append(f"  {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    for line in [*records(options.folder), *tables(options.folder), *support(options.folder)]:
        print(line)


if __name__ == "__main__":
    main()
