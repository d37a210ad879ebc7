"""Python scripts in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

LIMIT = 900
"""Seconds: more than any of them takes on a busy machine."""


def ended(script: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``script`` with the modules that this process finds, and in its environment, except as given."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    every = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    return subprocess.run(command, env=every, capture_output=True, text=True, timeout=LIMIT)


def printed(script: str, *arguments: object, **environment: str) -> str:
    """What ``script`` prints, which must not fail."""
    done = ended(script, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout
