"""How much memory a streamed run will take, worked out before it; how much it took; and how much there is."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import torch

from bitport.calibrate.blocks import Walk
from bitport.checkpoint.source import Source
from bitport.report.text import size
from bitport.schemes import Target

WORK = 40
"""Bytes per element of a weight while its codes are chosen and its errors measured: up to eight float32 copies of it
(the columns not yet rounded, scales and zero points spread over elements, the best of a search and the one that is
tried, dequantized values) and a float64 for the sums of errors."""
GRAMS = 6
"""Matrices [K, K] of float32 beside the sums themselves: H sorted, damped, its factor and inverse, and the product of a
batch that is added."""
RUNTIME = 128 << 20
"""What PyTorch's libraries come to need when they first run: code, packed matrices, buffers of threads."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes. ``base``: of the process before; ``weights``: the largest block; ``activations``: those in memory between
    two blocks; ``grams``: sums over the inputs of one block's weights; ``work``: choosing the codes of the largest
    weight, or running the block on the largest batch. ``disk``: activations in files."""

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
        listed = ", ".join(f"{name} {size(value)}" for name, value in parts)
        on_disk = f"; activations on disk {size(self.disk)}" if self.disk else ""
        return f"{size(self.total)} ({listed}){on_disk}"


def estimate(walk: Walk, files: Source, dtype: torch.dtype | None, *, on_disk: bool) -> Memory:
    """Of the block, or of what lies in no block, that takes most."""
    record = walk.record
    outputs = [[shapes[name].nbytes for name in walk.order] for shapes in record.shapes]
    given = sum(record.given)
    between = given + max((sum(step) for step in zip(*outputs, strict=True)), default=0)
    one = max(map(sum, zip(record.given, map(max, outputs), strict=True)), default=0) if outputs else 0
    tokens = max((count for each in outputs for count in each), default=0)
    steps = [(_bytes(files, [f"{name}."], dtype), walk.targets[name]) for name in walk.order]
    steps += [(_bytes(files, [target.name for target in walk.rest], dtype), walk.rest)]
    found = []
    for weights, targets in steps:
        grams = [_gram(target) for target in targets if target.name in walk.wanted]
        largest = max((WORK * _elements(target) for target in targets), default=0)
        widest = sum(_rows(target) for target in targets)
        hidden = min((_columns(target) for target in targets), default=1)
        run = 2 * tokens + (tokens * widest) // max(hidden, 1)
        work = max(largest + GRAMS * max(grams, default=0), run)
        found.append((weights, sum(grams), work))
    weights, grams_of, work = max(found, key=sum)
    return Memory(resident(), weights, one if on_disk else between, grams_of, work, 2 * between if on_disk else 0)


def _bytes(files: Source, prefixes: Collection[str], dtype: torch.dtype | None) -> int:
    total = 0
    for name, held in files.tensors.items():
        if name.startswith(tuple(prefixes)) and name not in files.tied:
            kept = dtype if dtype is not None and held.dtype.is_floating_point else held.dtype
            total += torch.Size(held.shape).numel() * kept.itemsize
    return total


def _elements(target: Target) -> int:
    """Of one matrix of it: experts are solved one after the other, but stacked in the end."""
    return torch.Size(target.shape).numel()


def _rows(target: Target) -> int:
    return target.shape[-1] if target.transposed else target.shape[-2]


def _columns(target: Target) -> int:
    return target.shape[-2] if target.transposed else target.shape[-1]


def _gram(target: Target) -> int:
    return torch.Size(target.shape[:-2]).numel() * _columns(target) ** 2 * 4


def resident() -> int:
    """Bytes of memory that this process holds now; 0 where the system does not say."""
    status = Path("/proc/self/status")
    return _field(status, "VmRSS") if status.is_file() else 0


def peak() -> int:
    """The most that this process has held since it began; 0 where the system does not say."""
    if sys.platform == "win32":
        return 0
    used = importlib.import_module("resource").getrusage(0).ru_maxrss
    return max(int(used) * (1 if sys.platform == "darwin" else 1024), resident())  # Linux counts the peak in batches


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
    """memory.max of the control group (version 2) and of those that it lies in; the word "max" there is no number."""
    own = Path("/proc/self/cgroup")
    line = next((line for line in own.read_text().splitlines() if line.startswith("0::")), "") if own.is_file() else ""
    here = Path("/sys/fs/cgroup") / line.removeprefix("0::").lstrip("/")
    for path in (here, *here.parents):
        if path.is_relative_to("/sys/fs/cgroup"):
            yield path / "memory.max"


def _field(path: Path, name: str) -> int:
    lines = (line.split() for line in path.read_text().splitlines())
    return next((int(words[1]) * 1024 for words in lines if words and words[0] == f"{name}:"), 0)
