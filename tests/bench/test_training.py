"""The training page uses only complete runs."""

from __future__ import annotations

from typing import Any

from bench.training.page import newest, of_scales

MACHINE = {"cpu": "some", "threads": 2}


def run(name: str, what: str, rows: int) -> list[dict[str, Any]]:
    head = {"run": name, "commit": "c", "machine": MACHINE, "busy": 0.0, "what": what}
    common = {"run": name, "steps": 150, "tokens": 9, "float": 2.0, "alone": 3.0, "trained": 2.5}
    return [head, *({**common, "scheme": f"int{at}", "algorithm": "gptq"} for at in range(rows))]


def test_the_newest_run_that_was_not_broken_off() -> None:
    lines = [*run("r1", "scales", 3), *run("r2", "scales", 3), *run("r3", "scales", 1), *run("r4", "steps", 7)]
    found = newest(lines, "scales")
    assert found is not None
    head, rows = found
    assert head["run"] == "r2"
    assert [row["scheme"] for row in rows] == ["int0", "int1", "int2"]
    assert newest(lines, "gradients") is None
    assert "| int2 | 3.0000 → 2.5000 |" in of_scales(head, rows)
