"""A process for each peer, so that one that crashes or hangs is a result and not the end of the run.

The parent asks, the child answers; only one child computes at a time. The children make the same weight from the same
seed. Accuracy is judged on a few rows, in float64: against the product with the weight that the peer effectively uses
(``sqnr_db``, what its kernel loses) and with the weight as it was (``end_db``, what is lost in all).
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import math
import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.peers import PEERS
from bench.peers.base import Prepared
from bench.suites import Shape
from bitport.numerics import sqnr

BYTES = 128 << 20
"""Of bf16 weights that a candidate has. A turn uses each copy at most once, and the parent empties the caches between
turns, so weights come from memory, as those of a large model do."""

FLUSH = 384 << 20
"""Bytes read between turns: more than last-level caches hold."""

PATIENCE = 300.0
"""Seconds until an answer is overdue."""


def copies_of(shape: Shape) -> int:
    """One more than is timed in a turn: the first call of a turn only wakes threads."""
    return min(64, max(3, BYTES // (2 * shape.n * shape.k)))


class Lost(Exception):
    """The peer's process is gone, or did not answer; the message says which."""


class Worker:
    """The parent's end. A request raises Lost once the process is lost; a peer's own error comes back as a string."""

    def __init__(self, peer: str, threads: int) -> None:
        self._peer, self._threads = peer, threads
        self.restart()

    def restart(self) -> None:
        self.lost = ""
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._said = tempfile.NamedTemporaryFile(prefix="bench-")  # noqa: SIM115
        arguments = (there, PEERS[self._peer], self._threads, self._said.name)
        self._process = context.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        there.close()

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
        """What the process printed last may tell more."""
        lines = Path(self._said.name).read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        self.lost = f"{why}; it said last: {last[:200]}" if last else why
        self._process.kill()
        raise Lost(self.lost)

    def close(self) -> None:
        self._here.close()
        self._said.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()


class Flusher:
    """Empties the caches of what was used before, and lets the threads of the last candidate fall asleep: they spin for
    some milliseconds after their work. It uses one thread, since its own would spin too."""

    def __init__(self, nbytes: int = FLUSH) -> None:
        self._buffer = np.ones(nbytes // 8, dtype=np.int64)

    def __call__(self) -> None:
        self._buffer.sum()


def serve(pipe: Connection, module: str, threads: int, said: str) -> None:
    """The child's loop: any error of a peer's library is an answer, as (False, what it said). What libraries print goes
    into the file ``said``."""
    with open(said, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
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
        for held in (self._prepared, self._inputs, self._exact):
            held.clear()  # type: ignore[attr-defined]
        self._shape, self._group = shape, group
        self._weight, self._x = operands(shape, max(rows))
        self._judged = sorted({row for m in rows for row in judged(m)})
        self._original = self._x[self._judged].double() @ self._weight.double().t()

    def prepare(self, variant: str) -> str:
        """ "", or why the peer cannot have this weight."""
        with torch.inference_mode():
            made = self.peer.prepare(variant, self._weight, self._group, copies_of(self._shape))
            if isinstance(made, str):
                return made
            self._prepared[variant] = made
            self._exact[variant] = self._x[self._judged].double() @ made.value().t()
        return ""

    def judge(self, variant: str, m: int, turn: float) -> dict[str, Any]:
        """The first calls with m rows: how exact they are, about how many seconds one takes, and how many, each with a
        copy of its own, fill ``turn`` seconds. These have run once afterwards: what a library prepares is prepared."""
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
                "nbytes": made.nbytes,
            }
            self.time(variant, m, 1)
            seconds = min(self.time(variant, m, 1))
            calls = max(1, min(len(made.calls) - 1, int(turn / max(seconds, 1e-7))))
            for call in made.calls[2 : calls + 1]:
                call(x)
        return {**found, "seconds": seconds, "calls": calls}

    def time(self, variant: str, m: int, calls: int) -> list[float]:
        """Seconds of each of ``calls`` calls, each with its own copy of the weight, after one that is not counted."""
        x, (first, *others), found = self._input(variant, m), self._prepared[variant].calls, []
        with torch.inference_mode():
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
    """Rows that accuracy is judged on: the first, the last, and one between."""
    return tuple(sorted({0, m // 2, m - 1}))


def _db(value: Tensor) -> float:
    return round(float(value), 1) if math.isfinite(value) else 999.0


def _version(package: str) -> str:
    return importlib.metadata.version(package)
