"""How much memory a run will take, worked out before it; how much it took; and how much there is."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

from bitport.errors import ArgumentError
from bitport.report.text import size

WORK = 32
"""Bytes per element of a weight while its codes are chosen: up to eight float32 copies of it (the columns not yet
rounded, scales and zero points spread over elements, the best of a search and the one that is tried, dequantized
values)."""
ROUNDED = 4
"""The same where a kernel rounds it to nearest: codes and scales as they come out and as they are kept."""
RUNTIME = 128 << 20
"""What PyTorch's libraries come to need when they first run: code, packed matrices, buffers of threads."""
OWN_GROUPS, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
"""Which control groups this process is in, and where they are."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes. ``base``: of the process before; ``weights``: the largest block, or the largest tensor where they come one
    by one; ``activations``: those in memory between two blocks; ``grams``: sums over the inputs of one block's weights,
    or counts of the inputs of all with static scales; ``work``: choosing the codes of the largest weight, running the
    block on the largest batch, or changing it in float. ``disk``: activations in files."""

    base: int
    weights: int
    activations: int
    grams: int
    work: int
    disk: int = 0

    @property
    def total(self) -> int:
        return self.base + self.weights + self.activations + self.grams + self.work + RUNTIME

    def __str__(self) -> str:
        parts = [(name, getattr(self, name)) for name in ("weights", "activations", "grams", "work", "base")]
        listed = ", ".join(f"{name} {size(value)}" for name, value in parts if value)
        on_disk = f"; activations on disk {size(self.disk)}" if self.disk else ""
        return f"{size(self.total)} ({listed}){on_disk}"

    def check(self, given: int | None, advice: str) -> None:
        """ArgumentError where it is more than ``given``, by default than the machine allows."""
        limit = available() if given is None else given
        if limit is not None and self.total > limit:
            raise ArgumentError(f"this needs about {self} of memory, and {size(limit)} are allowed: {advice}")


def resident() -> int:
    """Bytes of memory that this process holds now; 0 where the system does not say."""
    status = Path("/proc/self/status")
    return _field(status, "VmRSS") if status.is_file() else 0


def peak() -> int:
    """The most that this process has held since it began; 0 where the system does not say."""
    status = Path("/proc/self/status")
    if status.is_file():  # getrusage begins with the peak of the process that started this one
        return max(_field(status, "VmHWM"), resident())
    if sys.platform != "darwin":
        return 0
    return int(importlib.import_module("resource").getrusage(0).ru_maxrss)


def available() -> int | None:
    """How much this process may hold in all, by what is free, by its resource limits and by its control group."""
    limits = []
    free = Path("/proc/meminfo")
    if free.is_file():
        limits.append(_field(free, "MemAvailable") + resident())
    for path in _groups():
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(path.read_text()))
    if sys.platform != "win32":
        resource = importlib.import_module("resource")
        softs = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
        limits += [soft for soft in softs if soft != resource.RLIM_INFINITY]
    return min(limits, default=None)


def _groups() -> Iterator[Path]:
    """Files with the limit of the control group and of those that it lies in. Without one they hold the word "max", or
    (version 1) a number that no machine has."""
    for line in OWN_GROUPS.read_text().splitlines() if OWN_GROUPS.is_file() else ():
        _, kinds, own = line.split(":", 2)
        if not kinds:
            root, file = GROUPS, "memory.max"
        elif "memory" in kinds.split(","):
            root, file = GROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        here = root / own.lstrip("/")
        yield from (path / file for path in (here, *here.parents) if path.is_relative_to(root))


def _field(path: Path, name: str) -> int:
    lines = (line.split() for line in path.read_text().splitlines())
    return next((int(words[1]) * 1024 for words in lines if words and words[0] == f"{name}:"), 0)
