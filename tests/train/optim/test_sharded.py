"""Parameters sharded over two processes (FSDP2): the same numbers as in one process, and states that can be saved and
resumed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_two_processes_do_as_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.train.optim.on_two_processes"]
    running = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path), "8bit", "fp8"],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=300)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert all("all is well" in text for text in said), said[0] + said[1]
