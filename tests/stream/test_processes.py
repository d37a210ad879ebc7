"""Two processes together leave the very files of one."""

from __future__ import annotations

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
import sys, torch
import torch.distributed as dist
from bitport.calibrate.processes import Processes
from bitport.stream import Stream
from tests.stream.models import batches, empty
torch.set_num_threads(1)
meet, rank, source, target, activations = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{meet}", rank=int(rank), world_size=2)
stream = Stream(empty(), source, target, {"embed": "int8", "*": "int4-g32"}, batches=batches()[:3],
                activations=activations, processes=Processes.joined())
print(stream.run().to_json())
dist.destroy_process_group()
"""


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize("activations", ["memory", "disk"])
def test_two_do_what_one_does(tmp_path: Path, activations: str) -> None:
    """Three batches: one process has two of them."""
    source = write(tmp_path)
    recipe = {"embed": "int8", "*": "int4-g32"}
    report = Stream(empty(), source, tmp_path / "alone", recipe, batches=batches()[:3], activations=activations).run()
    words = [sys.executable, "-c", ONE, str(tmp_path / "meet")]
    rest = [str(source), str(tmp_path / "together"), activations]
    running = [
        subprocess.Popen([*words, str(rank), *rest], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    told = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], told
    assert told[0][0] == told[1][0]
    assert hashes(tmp_path / "together") == hashes(tmp_path / "alone")
    assert all(f'"{layer.name}"' in told[0][0] for layer in report.layers)


def test_batches_are_dealt_out() -> None:
    parts = [Processes(rank, 3).share(range(8)) for rank in range(3)]
    assert [list(part) for part in parts] == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert Processes(0, 3).rounds(8) == 3
    with pytest.raises(ArgumentError, match="2 batches are too few for 3 processes"):
        Processes(0, 3).share(range(2))
