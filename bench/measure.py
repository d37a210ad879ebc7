"""Metadata that every suite records along with its figures, and the record files of runs."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(os.environ.get("BENCH_RESULTS") or Path(__file__).parent / "results")


def machine() -> dict[str, Any]:
    """What the figures depend on, without identifying the machine."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def busy() -> float | None:
    """The number of cores that others use for half a second while this process sleeps; None if the system does not
    report it."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None

    def ticks() -> tuple[int, int]:
        spent = [int(each) for each in stat.read_text().split("\n", 1)[0].split()[1:9]]
        return sum(spent), spent[3] + spent[4]

    (total, idle), _ = ticks(), time.sleep(0.5)
    now, now_idle = ticks()
    return round((1 - (now_idle - idle) / max(now - total, 1)) * (os.cpu_count() or 1), 2)


def header() -> dict[str, Any]:
    """The first line of a run; rows refer to it by ``run``."""
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"run": now, "commit": _commit(), "machine": machine()}


def record(suite: str, head: dict[str, Any], rows: Iterable[dict[str, Any]]) -> Path:
    """Append a run: its header, and the rows, which refer to it."""
    return append(suite, [head, *({"run": head["run"], **row} for row in rows)])


def append(suite: str, lines: list[dict[str, Any]]) -> Path:
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{suite}.jsonl"
    with path.open("a") as file:
        for line in lines:
            file.write(json.dumps(line) + "\n")
    return path


def _cpu_model(info: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU name, with what sets it apart where virtual machines use one name for different processors: "AVX2" if it
    has no AVX-512; "Zen 4", whose 512-bit units are half as wide as those of the other "AMD EPYC" with AVX-512."""
    fields: dict[str, str] = {}
    if info.exists():
        pairs = (line.partition(":") for line in info.read_text(encoding="utf-8", errors="replace").splitlines())
        fields = {name.strip(): value.strip() for name, _, value in pairs}
    name = fields.get("model name") or platform.processor() or platform.machine()
    flags = fields.get("flags", "").split()
    if "avx2" in flags and "avx512f" not in flags:
        return f"{name}, AVX2"
    return f"{name}, Zen 4" if (name, fields.get("cpu family")) == ("AMD EPYC", "25") else name


def _commit() -> str:
    """The measured commit, with "+" if the working tree differs from it; outside a git checkout BENCH_COMMIT, or
    ""."""
    try:
        head = _git(ROOT, "rev-parse", "--short", "HEAD")
        return head + ("+" if _git(ROOT, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("BENCH_COMMIT", "")


def state_of(commit: str, *paths: str) -> str:
    """For pages: a commit, and how often the files in ``paths`` have been changed since then, where git can tell."""
    try:
        count = int(_git(ROOT, "rev-list", "--count", f"{commit.rstrip('+')}..HEAD", "--", *paths))
    except (OSError, subprocess.CalledProcessError):
        count = 0
    return f"commit {commit}" + (f" ({', '.join(paths)} changed in {count} commits since)" if count else "")


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.strip()
