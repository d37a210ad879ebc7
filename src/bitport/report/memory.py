"""Memory: the estimate for a run, the peak so far, and how much is available."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bitport.arguments import bytes_of
from bitport.errors import ArgumentError
from bitport.report.text import size

WORK = 32
"""Bytes per element of a weight while its codes are chosen: up to eight float32 copies of it (the columns not yet
rounded, scales and zero points expanded to elements, the best and the current candidate of a search, dequantized
values)."""
ROUNDED = 4
"""The same if a kernel rounds it to nearest: codes and scales as computed and as stored."""
RUNTIME = 128 << 20
"""What PyTorch's libraries allocate when they first run: code, packed matrices, thread buffers."""
OWN_GROUPS, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
"""The list of control groups of this process, and the mount point of control groups."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory estimate in bytes. ``base``: the process before the run; ``weights``: the largest block, or the largest
    tensor if tensors are processed one by one; ``activations``: those kept in memory between two blocks; ``grams``:
    sums over the inputs of one block's weights, or histograms of the inputs of all weights with static scales;
    ``work``: choosing the codes of the largest weight, running the block on the largest batch, or transforming it in
    float. ``disk``: activations in files.

    If the model runs on another ``device``, weights, grams and work are there, with the activations of one batch:
    ``on_device`` in all. The fields above are then what passes through this machine's memory."""

    base: int
    weights: int
    activations: int
    grams: int
    work: int
    disk: int = 0
    on_device: int = 0
    device: torch.device | None = None

    @property
    def total(self) -> int:
        return self.base + self.weights + self.activations + self.grams + self.work + RUNTIME

    def __str__(self) -> str:
        parts = [(name, getattr(self, name)) for name in ("weights", "activations", "grams", "work", "base")]
        listed = ", ".join(f"{name} {size(value)}" for name, value in parts if value)
        on_disk = f"; activations on disk {size(self.disk)}" if self.disk else ""
        there = f"; on {self.device} {size(self.on_device)}" if self.device is not None else ""
        return f"{size(self.total)} ({listed}){on_disk}{there}"

    def check(self, given: int | str | None, advice: str) -> None:
        """Raise ArgumentError if the total exceeds ``given``, by default what the machine allows, or the other part
        what is free on the device."""
        limit = available() if given is None else bytes_of(given, "memory_limit")
        if limit is not None and self.total > limit:
            raise ArgumentError(f"this needs about {self} of memory, and {size(limit)} are allowed: {advice}")
        free = None if self.device is None else free_on(self.device)
        if free is not None and self.on_device > free:
            raise ArgumentError(
                f"this needs about {size(self.on_device)} on {self.device}, and {size(free)} are free there: free "
                "some, choose another device, such as cpu, or leave out the largest weights"
            )


def resident() -> int:
    """Resident memory of this process in bytes; 0 if the system does not report it."""
    status = Path("/proc/self/status")
    return _field(status, "VmRSS") if status.is_file() else 0


def peak() -> int | None:
    """Peak resident memory of this process in bytes; None if the system does not report it."""
    status = Path("/proc/self/status")
    if status.is_file():  # preferred to getrusage, whose peak is inherited from the parent process
        return max(_field(status, "VmHWM"), resident())
    if sys.platform != "darwin":
        return None
    return int(importlib.import_module("resource").getrusage(0).ru_maxrss)


def available() -> int | None:
    """The most this process may hold in total: the minimum of free memory, resource limits and control group limits."""
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


def free_on(device: torch.device) -> int | None:
    """Free memory of a device, including what PyTorch keeps for reuse; None if its module in torch cannot tell."""
    module: Any = getattr(torch, device.type, None)
    if not hasattr(module, "mem_get_info"):
        return None
    free, _ = module.mem_get_info(device)
    return int(free + module.memory_reserved(device) - module.memory_allocated(device))


def _groups() -> Iterator[Path]:
    """Limit files of this process's control group and its ancestors. If unlimited they contain the word "max" or, in
    version 1, a number larger than any machine's memory."""
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
