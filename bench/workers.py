"""Processes for what may crash or hang: that is a result then, and not the end of the run. The parent asks, the child
answers; only one child computes at a time."""

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
"""Bytes read between turns: more than last-level caches hold."""

PATIENCE = 300.0
"""Seconds until an answer is overdue."""


class Lost(Exception):
    """The process is gone, or did not answer; the message says which."""


class Worker:
    """The parent's end of a process in which ``child(*arguments)`` answers; every request is a method of it. One raises
    Lost once the process is lost; an error in the child comes back as a string."""

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


def ask(worker: Worker, request: str, *arguments: Any) -> tuple[Any, str]:
    """(answer, "") or (None, why there is none)."""
    try:
        done, answer = worker(request, *arguments)
    except Lost as lost:
        return None, without_paths(str(lost))
    return (answer, "") if done else (None, without_paths(answer))


def without_paths(text: str) -> str:
    """Reasons are recorded, and where a library lies on this machine is no part of one."""
    return re.sub(r"(?<![\w.:/])/(?:[\w.+@-]+/)+", "", text)


def serve(pipe: Connection, said: str, threads: int, make: Callable[..., Any], given: tuple[Any, ...]) -> None:
    """The child's loop: any error of a library is an answer, as (False, what it said), if the child is ``usable()``
    after it; else the process ends, so that no other request is answered by that error. What libraries print goes into
    the file ``said``."""
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
