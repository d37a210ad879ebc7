"""Compare a run that is killed at its disk writes and resumed with one that is not killed. For scripts: it forks."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .stream.models import hashes

WRITES = ("fsync", "replace", "open", "unlink", "mkdir")


def check_kills(folder: Path, run: Callable[[Path], Any], places: int) -> None:
    """Kill ``run(target)``, which resumes what it finds there, at each of ``places`` random writes, and twice in one
    run. Every time, the resulting files must equal those of an undisturbed run."""
    run(folder / "first")  # so that the forks below need not repeat its imports
    writes = _child(run, folder / "whole")
    expected = hashes(folder / "whole")
    assert writes is not None
    assert "bitport.json" in expected
    at_writes = sorted(random.Random(0).sample(range(2, writes), places))
    for at, kills in enumerate([*([place] for place in at_writes), [at_writes[2], 2]]):
        target = folder / f"killed {at}"
        for last in kills:
            assert _child(run, target, last) is None, "it was to be killed"
        assert _child(run, target) is not None
        assert hashes(target) == expected, f"killed at {kills} of {writes}"
    print(writes, at_writes)


def _child(run: Callable[[Path], Any], target: Path, last: int | None = None) -> int | None:
    """Run in a child process that kills itself at its write number ``last``; return how many writes it made."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        calls = 0

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def stands_for(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == last:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **kwargs)

            return stands_for

        for name in WRITES:
            setattr(os, name, counted(getattr(os, name)))
        run(target)
        os.write(write, str(calls).encode())
        os._exit(0)
    os.close(write)
    _, status = os.waitpid(pid, 0)
    told = os.read(read, 100)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    return int(told) if told else None
