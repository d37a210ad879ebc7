"""The code that runs in the process of a peer: it prepares weights, judges results, and measures time.

All children create the same weight from the same seed. Accuracy is judged on a few rows, in float64: against the
product with the weight that the peer effectively uses (``sqnr_db``, the loss of its kernel) and with the original
weight (``end_db``, the total loss).
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import math
import time
from typing import Any

import torch
from torch import Tensor

from bench.peers.base import Prepared
from bench.suites import CLASSES, Shape
from bitport.numerics import sqnr

BYTES = 256 << 20
"""Size in bf16 of all copies of a candidate's weight. A turn uses each copy at most once, and the parent flushes the
caches between turns, so weights come from memory, as those of a large model do."""

SLOW = 0.1
"""Seconds above which a call needs no warm-up call."""

AWAKE = 0.01
"""Seconds of warm-up calls before the timed ones of a turn. Threads that have just woken may share a core until the
scheduler rebalances, some 4 ms later: the time of a shorter call would depend on luck."""


def copies_of(shape: Shape) -> int:
    """One more than is timed in a turn: the first only wakes threads."""
    return min(64, max(3, BYTES // (2 * shape.n * shape.k)))


class Child:
    def __init__(self, module: str) -> None:
        self._module = module
        self._prepared: dict[str, Prepared] = {}
        self._inputs: dict[tuple[str, int], Any] = {}
        self._exact: dict[str, Tensor] = {}
        self._seconds: dict[tuple[str, int], float] = {}

    @functools.cached_property
    def peer(self) -> Any:
        return importlib.import_module(self._module)

    def start(self) -> dict[str, Any]:
        versions = {name: _version(name) for name in self.peer.PACKAGES}
        if unknown := set(self.peer.VARIANTS.values()) - set(CLASSES):
            raise ValueError(f"VARIANTS names {', '.join(sorted(unknown))}; the classes are {', '.join(CLASSES)}")
        return {"variants": dict(self.peer.VARIANTS), "versions": versions}

    def shape(self, shape: Shape, rows: tuple[int, ...], group: int) -> None:
        """Forget the last shape, and create the weight and input of this one."""
        for held in (self._prepared, self._inputs, self._exact, self._seconds):
            held.clear()  # type: ignore[attr-defined]
        self._shape, self._group = shape, group
        self._weight, self._x = operands(shape, max(rows))
        self._judged = sorted({row for m in rows for row in judged(m)})
        self._original = self._x[self._judged].double() @ self._weight.double().t()

    def prepare(self, variant: str) -> str:
        """Return "", or why the peer cannot handle this weight."""
        with torch.inference_mode():
            made = self.peer.prepare(variant, self._weight, self._group, copies_of(self._shape))
            if isinstance(made, str):
                return made
            self._prepared[variant] = made
            self._exact[variant] = self._x[self._judged].double() @ made.value().t()
        return ""

    def judge(self, variant: str, m: int, turn: float) -> dict[str, Any]:
        """Run the first calls with m rows. Returns their accuracy, the approximate seconds of a call, and how many
        calls, each with its own copy, fill ``turn`` seconds. These have run once afterwards, so libraries have finished
        their preparations."""
        made = self._prepared[variant]
        with torch.inference_mode():
            self._inputs = {key: x for key, x in self._inputs.items() if key[1] == m}
            x = self._input(variant, m)
            start = time.perf_counter()
            given = made.calls[0](x)
            seconds = time.perf_counter() - start
            y = made.output(given)
            if tuple(y.shape) != (m, self._shape.n):
                raise ValueError(f"the result is {tuple(y.shape)}, not {(m, self._shape.n)}")
            rows = judged(m)
            at = [self._judged.index(row) for row in rows]
            found = {
                "sqnr_db": _db(sqnr(self._exact[variant][at], y[list(rows)])),
                "end_db": _db(sqnr(self._original[at], y[list(rows)])),
                "note": made.note(x),
                "nbytes": made.nbytes,
            }
            if seconds < SLOW:
                self.time(variant, m, 1)
            seconds = self._seconds[variant, m] = min(self.time(variant, m, 1))
            calls = max(1, min(len(made.calls) - 1, int(turn / max(seconds, 1e-7))))
            for call in made.calls[2 : calls + 1]:
                call(x)
        return {**found, "seconds": seconds, "calls": calls}

    def time(self, variant: str, m: int, calls: int) -> list[float]:
        """Seconds of each of ``calls`` calls, each with its own copy of the weight. Untimed calls with another copy
        precede them to wake the threads, unless calls are so slow that this does not matter."""
        x, (first, *others), found = self._input(variant, m), self._prepared[variant].calls, []
        with torch.inference_mode():
            begin = time.perf_counter()
            while self._seconds.get((variant, m), 0.0) < SLOW and time.perf_counter() - begin < AWAKE:
                first(x)
            for call in others[:calls]:
                start = time.perf_counter()
                call(x)
                found.append(time.perf_counter() - start)
        return found

    def _input(self, variant: str, m: int) -> Any:
        if (variant, m) not in self._inputs:
            self._inputs[variant, m] = self._prepared[variant].accept(self._x[:m])
        return self._inputs[variant, m]


def operands(shape: Shape, rows: int) -> tuple[Tensor, Tensor]:
    """weight [n, k] and x [rows, k], the same in every process."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(shape.n, shape.k, generator=generator) * 0.02).bfloat16()
    return weight, torch.randn(rows, shape.k, generator=generator).bfloat16()


def judged(m: int) -> tuple[int, ...]:
    """The rows that accuracy is judged on: the first, the last, and one in between."""
    return tuple(sorted({0, m // 2, m - 1}))


def _db(value: Tensor) -> float:
    return round(float(value), 1) if math.isfinite(value) else 999.0


def _version(package: str) -> str:
    return importlib.metadata.version(package)
