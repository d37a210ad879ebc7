"""Two processes together leave the very files of one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from bitport.calibrate.processes import Processes
from bitport.errors import ArgumentError
from bitport.stream import Stream

from .models import batches, empty, hashes, write

ONE = """
import os, sys, torch
from bitport.calibrate.processes import Processes
from bitport.stream import Stream
from tests.stream.models import batches, empty
torch.set_num_threads(1)
source, target, scheme, algorithm, activations = sys.argv[1:]
with Processes.of_torchrun() as processes:
    stream = Stream(empty(), source, target, {"embed": "int8", "*": scheme}, batches=batches()[:3],
                    algorithm=algorithm, activations=activations, processes=processes)
    print(stream.run().to_json())
tasks = "/proc/self/task"
names = [open(f"{tasks}/{task}/comm").read() for task in os.listdir(tasks)] if os.path.exists(tasks) else []
assert not [name for name in names if "gloo" in name], names
"""
"""After it no thread of the group is left: as the interpreter ends such a thread may abort the process."""


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize(
    ("scheme", "algorithm", "activations"),
    [
        ("int4-g32", "gptq", "memory"),
        ("int4-g32", "gptq", "disk"),
        ("int8-static", "rtn", "memory"),
        ("int8-static", "gptq", "disk"),
    ],
)
def test_two_do_what_one_does(tmp_path: Path, scheme: str, algorithm: str, activations: str) -> None:
    """Three batches: one process has two of them."""
    source = write(tmp_path)
    recipe, options = {"embed": "int8", "*": scheme}, {"algorithm": algorithm, "activations": activations}
    report = Stream(empty(), source, tmp_path / "alone", recipe, batches=batches()[:3], **options).run()
    words = [sys.executable, "-c", ONE, str(source), str(tmp_path / "together"), scheme, algorithm, activations]
    started = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    running = [
        subprocess.Popen(words, env=started | {"RANK": rank}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in ("0", "1")
    ]
    told = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], told
    assert told[0][0] == told[1][0]
    assert hashes(tmp_path / "together") == hashes(tmp_path / "alone")
    assert all(f'"{layer.name}"' in told[0][0] for layer in report.layers)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def test_batches_are_dealt_out() -> None:
    parts = [Processes(rank, 3).share(range(8)) for rank in range(3)]
    assert [list(part) for part in parts] == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert Processes(0, 3).rounds(8) == 3
    with pytest.raises(ArgumentError, match="2 batches are too few for 3 processes"):
        Processes(0, 3).share(range(2))
