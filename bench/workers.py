"""Run code that may crash or hang in separate processes, where this is a result rather than the end of the run. The
parent sends requests, the child answers; only one child computes at a time."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

FLUSH = 384 << 20
"""Bytes read between turns: more than the last-level cache."""

PATIENCE = 300.0
"""Timeout for an answer, in seconds."""


class Lost(Exception):
    """The process has died or did not answer; the message says which."""


class Worker:
    """The parent's end of a process in which ``child(*arguments)`` answers; every request is one of its methods.
    Requests raise Lost once the process is lost; an error in the child is returned as a string."""

    def __init__(self, threads: int, child: Callable[..., Any], *arguments: Any) -> None:
        self._threads, self._child, self._arguments = threads, child, arguments
        self.restart()

    def restart(self) -> None:
        self.lost = ""
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._said = tempfile.NamedTemporaryFile(prefix="bench-")  # noqa: SIM115
        arguments = (there, self._said.name, self._threads, self._child, self._arguments)
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
        """Kill the process and raise Lost, including its last line of output."""
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
    """Evicts previously used data from the caches, and gives the threads of the last candidate time to sleep: they spin
    for some milliseconds after their work. It uses one thread, since its own would spin too."""

    def __init__(self) -> None:
        self._buffer = np.ones(FLUSH // 8, dtype=np.int64)

    def __call__(self) -> None:
        self._buffer.sum()


def ask(worker: Worker, request: str, *arguments: Any) -> tuple[Any, str]:
    """(answer, ""), or (None, why there is none)."""
    try:
        done, answer = worker(request, *arguments)
    except Lost as lost:
        return None, without_paths(str(lost))
    return (answer, "") if done else (None, without_paths(answer))


def without_paths(text: str) -> str:
    """Remove paths of this machine from reasons, which are recorded."""
    return re.sub(r"(?<![\w.:/])/(?:[\w.+@-]+/)+", "", text)


def serve(pipe: Connection, said: str, threads: int, make: Callable[..., Any], given: tuple[Any, ...]) -> None:
    """The child's loop. Any error of a library is an answer, as (False, message), if the child is ``usable()`` after
    it; otherwise the process exits, so that the error does not affect other requests. Output of libraries goes to the
    file ``said``."""
    with open(said, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(threads)
    child = make(*given)
    while True:
        try:
            request, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, getattr(child, request)(*arguments))
        except Exception as error:
            answer = (False, f"{type(error).__name__}: {str(error).strip()[:500]}")
            if not getattr(child, "usable", lambda: True)():
                print(answer[1].splitlines()[0], file=sys.stderr, flush=True)
                os._exit(1)
        pipe.send(answer)
