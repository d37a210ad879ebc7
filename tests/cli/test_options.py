"""Options of ``bitport quantize`` that would have no effect in combination with others."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Run

AUTO = ["--scheme", "auto", "--bits", "4"]
PLAIN = ["--scheme", "int4"]
IN_MEMORY = [*PLAIN, "--in-memory"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*IN_MEMORY, "--resume"], "--resume: not with --in-memory, which keeps the whole"),
        ([*IN_MEMORY, "--memory-limit", "1GB"], "--memory-limit: not with --in-memory"),
        ([*IN_MEMORY, "--algorithm", "gptq", "--activations", "disk"], "--activations: not with --in-memory"),
        ([*AUTO, "--resume", "--memory-limit", "1GB"], "--resume, --memory-limit: not with --scheme auto"),
        ([*PLAIN, "--data-tokens", "100"], "--data-tokens: for algorithms that look at inputs and schemes"),
        ([*PLAIN, "--data-tokens", "65536"], "--data-tokens: for algorithms that look at inputs and schemes"),
        ([*PLAIN, "--data-seed", "0"], "--data-seed: for algorithms that look at inputs and schemes"),
        ([*IN_MEMORY, "--activations", "memory"], "--activations: for algorithms that look at inputs and schemes"),
        ([*PLAIN, "--candidates", "int2"], "--candidates goes with --scheme auto and --bits"),
        ([*PLAIN, "--cost", "kl"], "--cost goes with --scheme auto and --bits"),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, list) else "",
)
def test_they_are_refused(run: Run, llama: Path, tmp_path: Path, words: list[str], message: str) -> None:
    ran = run("quantize", llama, *words, "-o", tmp_path / "out")
    assert (ran.code, (tmp_path / "out").exists()) == (2, False)
    assert ran.err.startswith(f"bitport: error: {message}")
