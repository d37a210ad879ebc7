"""The code that runs in the process of a GPU peer: as ``bench.child``, with weight and input on the device, timed by
events.

All copies of a weight are used one after the other in one graph, which is replayed: launches are not timed, as in a
model whose step is a graph, and between two uses of a copy the others pass through the cache, which they fill several
times. Calls that cannot be captured run eagerly; their note says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench import child
from bench.gpu.accelerator import Accelerator, present
from bench.suites import Shape

CACHES = 4
"""Total size of the copies of a 4-bit weight, as a multiple of the cache."""
MOST_COPIES = 512
MOST_PLAYS = 50


class GpuChild(child.Child):
    def __init__(self, module: str, gpu: Callable[[], Accelerator] = present) -> None:
        super().__init__(module)
        self._gpu = gpu()
        self._plays: dict[tuple[str, int], tuple[Callable[[], Any], str]] = {}

    def usable(self) -> bool:
        """Whether the device still works; after an invalid memory access everything in this process fails."""
        try:
            self._gpu.synchronize()
        except RuntimeError:
            return False
        return True

    def shape(self, shape: Shape, rows: tuple[int, ...], group: int) -> None:
        self._plays.clear()
        super().shape(shape, rows, group)
        self._weight, self._x, self._original = (
            each.to(self._gpu.device) for each in (self._weight, self._x, self._original)
        )

    def prepare(self, variant: str) -> str:
        with torch.no_grad():  # not in inference_mode, as methods.prepared explains
            made = self.peer.prepare(variant, self._weight, self._group, copies_of(self._shape, self._gpu.cache))
            if isinstance(made, str):
                return made
            self._prepared[variant] = made
            exact = made.value().to(self._gpu.device, torch.float64)
            self._exact[variant] = self._x[self._judged].double() @ exact.t()
        return ""

    def judge(self, variant: str, m: int, turn: float) -> dict[str, Any]:
        """``calls`` is the number of replays that fill ``turn`` seconds."""
        self._plays = {key: play for key, play in self._plays.items() if key[1] == m}
        found = super().judge(variant, m, turn)
        _, how = self._play(variant, m)
        a_play = found["seconds"] * len(self._prepared[variant].calls)
        note = ", ".join(part for part in (found["note"], how) if part)
        return {**found, "note": note, "calls": max(1, min(MOST_PLAYS, int(turn / max(a_play, 1e-9))))}

    def time(self, variant: str, m: int, calls: int) -> list[float]:
        """Seconds per call for each of ``calls`` replays, each directly after an untimed one."""
        play, _ = self._play(variant, m)
        with torch.inference_mode():
            count = len(self._prepared[variant].calls)
            return [self._gpu.seconds(play) / count for _ in range(calls)]

    def _play(self, variant: str, m: int) -> tuple[Callable[[], Any], str]:
        """(a function that makes all calls once, a note: "" for a graph)"""
        if (variant, m) not in self._plays:
            x, calls = self._input(variant, m), self._prepared[variant].calls

            def every() -> None:
                for call in calls:
                    call(x)

            with torch.inference_mode():
                try:
                    self._plays[variant, m] = self._gpu.recorded(every)[0], ""
                except RuntimeError as error:
                    self._gpu.synchronize()
                    reason = str(error).strip().splitlines()[0][:80]
                    self._plays[variant, m] = every, f"not in a graph ({reason})"
        return self._plays[variant, m]


def copies_of(shape: Shape, cache: int) -> int:
    return min(MOST_COPIES, max(3, -(-CACHES * cache // (shape.n * shape.k // 2))))
