"""A GPU under measurement: its properties, its timer, and graphs that are captured once and replayed.

Everything goes through the device's module: torch.cuda (also for ROCm) or torch.xpu. The two have the same names except
for the graph class.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

WARM = 3
"""Warm-up calls before a capture: kernels are compiled and tuned, workspaces are allocated."""


class Accelerator:
    def __init__(self, device: torch.device, module: Any = None) -> None:
        self.device = device
        self.module = torch.get_device_module(device) if module is None else module

    def about(self) -> dict[str, Any]:
        """Return what measurements depend on, and nothing that identifies a single machine."""
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
        """Bytes of the last-level cache; where the driver does not report it, as many as any device has."""
        properties = self.module.get_device_properties(self.device)
        known = (getattr(properties, name, 0) for name in ("L2_cache_size", "last_level_cache_size"))
        return int(next(filter(None, known), 256 << 20))

    def synchronize(self) -> None:
        self.module.synchronize()

    def seconds(self, run: Callable[[], Any]) -> float:
        """Device time of ``run``, between two events. An untimed call comes right before, so that the host's launch
        overhead, some 10 microseconds, passes while the device is busy."""
        start, end = (self.module.Event(enable_timing=True) for _ in range(2))
        run()
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def recorded(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Capture the device work of ``run`` in a graph; return (replay, result of ``run``). Each replay reads and
        writes the same memory."""
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
    """Replay ``graph``; ``run`` is an argument because a graph does not keep alive the memory that it reads."""
    graph.replay()


def _capability(properties: Any) -> str:
    return f"sm{properties.major}{properties.minor}" if hasattr(properties, "major") else ""
