"""A GPU as it is measured: what it is, its clock, and work that is recorded once and played again.

Everything goes through the device's module (torch.cuda, which ROCm is too, or torch.xpu); their names are the same but
for the class of a graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

WARM = 3
"""Calls before a recording: kernels are compiled and tuned, workspaces are allocated."""


class Accelerator:
    def __init__(self, device: torch.device, module: Any = None) -> None:
        self.device = device
        self.module = torch.get_device_module(device) if module is None else module

    def about(self) -> dict[str, Any]:
        """What figures depend on; nothing that names one machine."""
        properties = self.module.get_device_properties(self.device)
        return {
            "device": properties.name,
            "memory": properties.total_memory,
            "cache": self.cache,
            "capability": str(getattr(properties, "gcnArchName", "") or _capability(properties)),
            "toolkit": torch.version.cuda or torch.version.hip or getattr(torch.version, "xpu", None) or "",
        }

    @property
    def cache(self) -> int:
        """Bytes of the last cache before memory; where the driver does not tell, as much as any device has."""
        properties = self.module.get_device_properties(self.device)
        known = (getattr(properties, name, 0) for name in ("L2_cache_size", "last_level_cache_size"))
        return int(next(filter(None, known), 256 << 20))

    def synchronize(self) -> None:
        self.module.synchronize()

    def seconds(self, run: Callable[[], Any]) -> float:
        """Of the device, between two events around ``run``, right behind a run that does not count: what the host takes
        to launch it, some 10 microseconds, passes while the device is busy."""
        start, end = (self.module.Event(enable_timing=True) for _ in range(2))
        run()
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def recorded(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """(play, what ``run`` returned): a graph of the work that ``run`` gives to the device. Played, it reads and
        writes the same memory again."""
        side = self.module.Stream()
        side.wait_stream(self.module.current_stream())
        with self.module.stream(side):
            for _ in range(WARM):
                run()
        self.module.current_stream().wait_stream(side)
        kind = getattr(self.module, "CUDAGraph", None) or self.module.XPUGraph
        graph = kind()
        with self.module.graph(graph):
            result = run()
        return functools.partial(_replay, graph, run), result


def _replay(graph: Any, run: Callable[[], Any]) -> None:
    """``run`` comes along because a graph does not hold the memory that it reads."""
    graph.replay()


def _capability(properties: Any) -> str:
    return f"sm{properties.major}{properties.minor}" if hasattr(properties, "major") else ""
