"""Python scripts in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

LIMIT = 900
"""Seconds: more than any of them takes on a busy machine."""
FORKED_LIMIT = 120
"""The same for processes that work together, which may wait for each other for ever."""


def ended(script: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``script`` with the modules that this process finds, and in its environment, except as given."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    every = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    return subprocess.run(command, env=every, capture_output=True, text=True, timeout=LIMIT)


def forked(count: int, run: Callable[[int], object]) -> None:
    """Call ``run(number)`` in ``count`` processes at once, none of which may fail. For scripts: they import everything
    once, before they fork, which takes longer than most of what they do."""
    processes = []
    for number in range(count):
        processes.append(os.fork())
        if not processes[-1]:
            signal.alarm(FORKED_LIMIT)
            run(number)
            os._exit(0)
    assert [os.waitpid(process, 0)[1] for process in processes] == [0] * count


def printed(script: str, *arguments: object, **environment: str) -> str:
    """What ``script`` prints, which must not fail."""
    done = ended(script, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout
