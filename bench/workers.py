"""A process for each peer, so that one that crashes or hangs is a result and not the end of the run.

The parent asks, the child answers; only one child computes at a time. The children make the same weight from the same
seed. Accuracy is judged on a few rows, in float64: against the product with the weight that the peer effectively uses
(``sqnr_db``, what its kernel loses) and with the weight as it was (``end_db``, what is lost in all).
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import itertools
import math
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from bench.peers import PEERS
from bench.peers.base import Prepared
from bench.suites import Shape
from bitport.numerics import sqnr

BYTES = 128 << 20
"""Of bf16 weights that a candidate goes through. A turn uses each copy at most once, and the parent empties the caches
between turns, so weights come from memory, as those of a large model do."""

FLUSH = 384 << 20
"""Bytes read between turns: more than last-level caches hold."""

PATIENCE = 300.0
"""Seconds until an answer is overdue."""


def copies_of(shape: Shape) -> int:
    """One more than is timed in a turn: the first call of a turn only wakes threads."""
    return max(3, BYTES // (2 * shape.n * shape.k))


class Lost(Exception):
    """The peer's process is gone, or did not answer; the message says which."""


class Worker:
    """The parent's end. A request raises Lost once the process is lost; a peer's own error comes back as a string."""

    def __init__(self, peer: str, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=serve, args=(there, PEERS[peer], threads), daemon=True)
        self._process.start()
        there.close()
        self.lost = ""

    def __call__(self, request: str, *arguments: Any) -> Any:
        if self.lost:
            raise Lost(self.lost)
        try:
            self._here.send((request, arguments))
            if not self._here.poll(PATIENCE):
                self._lose(f"no answer within {PATIENCE:.0f} s")
            return self._here.recv()
        except (EOFError, OSError) as error:
            self._process.join(5)
            self._lose(f"its process ended with {self._process.exitcode} ({type(error).__name__})")

    def _lose(self, why: str) -> None:
        self.lost = why
        self._process.kill()
        raise Lost(why)

    def close(self) -> None:
        self._here.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()


class Flusher:
    """Empties the caches of everything that was used before."""

    def __init__(self, nbytes: int = FLUSH) -> None:
        self._buffer = torch.ones(nbytes // 8, dtype=torch.int64)

    def __call__(self) -> None:
        self._buffer.sum()


def serve(pipe: Connection, module: str, threads: int) -> None:
    """The child's loop: any error of a peer's library is an answer, as (False, what it said)."""
    torch.set_num_threads(threads)
    child = Child(module)
    while True:
        try:
            request, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, getattr(child, request)(*arguments))
        except Exception as error:
            answer = (False, f"{type(error).__name__}: {str(error).strip()[:500]}")
        pipe.send(answer)


class Child:
    def __init__(self, module: str) -> None:
        self._module = module
        self._prepared: dict[str, Prepared] = {}
        self._turn: dict[str, Iterator[Any]] = {}
        self._inputs: dict[tuple[str, int], Any] = {}
        self._exact: dict[str, Tensor] = {}

    @functools.cached_property
    def peer(self) -> Any:
        return importlib.import_module(self._module)

    def start(self) -> dict[str, Any]:
        versions = {name: _version(name) for name in self.peer.PACKAGES}
        return {"variants": dict(self.peer.VARIANTS), "versions": versions}

    def shape(self, shape: Shape, rows: tuple[int, ...], group: int) -> None:
        """Forget the last shape, make the weight and input of this one."""
        for held in (self._prepared, self._turn, self._inputs, self._exact):
            held.clear()  # type: ignore[attr-defined]
        self._shape, self._group = shape, group
        self._weight, self._x = operands(shape, max(rows))
        self._judged = sorted({row for m in rows for row in judged(m)})
        self._original = self._x[self._judged].double() @ self._weight.double().t()

    def prepare(self, variant: str) -> dict[str, Any]:
        with torch.inference_mode():
            made = self.peer.prepare(variant, self._weight, self._group, copies_of(self._shape))
            if isinstance(made, str):
                return {"reason": made}
            self._prepared[variant] = made
            self._turn[variant] = itertools.cycle(made.calls)
            self._exact[variant] = self._x[self._judged].double() @ made.value().t()
        return {"nbytes": made.nbytes}

    def judge(self, variant: str, m: int) -> dict[str, Any]:
        """The first calls with m rows: how exact, and about how long one takes."""
        made = self._prepared[variant]
        with torch.inference_mode():
            self._inputs = {key: x for key, x in self._inputs.items() if key[1] == m}
            x = self._input(variant, m)
            y = made.output(made.calls[0](x))
            if tuple(y.shape) != (m, self._shape.n):
                raise ValueError(f"the result is {tuple(y.shape)}, not {(m, self._shape.n)}")
            rows = judged(m)
            at = [self._judged.index(row) for row in rows]
            found = {
                "sqnr_db": _db(sqnr(self._exact[variant][at], y[list(rows)])),
                "end_db": _db(sqnr(self._original[at], y[list(rows)])),
                "note": made.note(x),
            }
            return {**found, "seconds": min(self.time(variant, m, 1))}

    def time(self, variant: str, m: int, calls: int) -> list[float]:
        """Seconds of each of ``calls`` calls, each with the next copy of the weight, after one that is not counted."""
        x, turn, found = self._input(variant, m), self._turn[variant], []
        with torch.inference_mode():
            next(turn)(x)
            for _ in range(calls):
                call = next(turn)
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
    """Rows that accuracy is judged on: the first, the last, and one between."""
    return tuple(sorted({0, m // 2, m - 1}))


def _db(value: Tensor) -> float:
    return round(float(value), 1) if math.isfinite(value) else 999.0


def _version(package: str) -> str:
    return importlib.metadata.version(package)
