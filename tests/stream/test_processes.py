"""Two processes together produce exactly the files of one."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from bitport.calibrate.processes import Processes
from bitport.errors import ArgumentError
from bitport.stream import Stream
from tests.scripts import printed

from .models import batches, empty, hashes, write

BOTH = """
import json, os, sys, torch
import torch._dynamo  # as in tests/ranks.py
from pathlib import Path
from bitport.calibrate.processes import Processes
from bitport.stream import Stream
from tests.scripts import forked
from tests.stream.models import batches, empty
torch.set_num_threads(1)
source, target, runs = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])

def run(rank):
    os.environ["RANK"] = str(rank)
    told = []
    with Processes.of_torchrun() as processes:
        for name, (scheme, algorithm, activations) in runs.items():
            stream = Stream(empty(), source, target / name, {"embed": "int8", "*": scheme}, batches=batches()[:3],
                            algorithm=algorithm, activations=activations, processes=processes)
            told.append(json.dumps(stream.run().to_json()))
    tasks = "/proc/self/task"
    names = [open(f"{tasks}/{task}/comm").read() for task in os.listdir(tasks)] if os.path.exists(tasks) else []
    assert not [name for name in names if "gloo" in name], names
    (target / f"told-{rank}.json").write_text(json.dumps(told))

forked(2, run)
"""
"""No thread of the process group may remain: at interpreter shutdown such a thread may abort the process."""
RUNS = {
    "gptq in memory": ("int4-g32", "gptq", "memory"),
    "gptq on disk": ("int4-g32", "gptq", "disk"),
    "static in memory": ("int8-static", "rtn", "memory"),
    "static by gptq on disk": ("int8-static", "gptq", "disk"),
}


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    """The folder with the model and the results of two processes, one run after another, and the reports of each
    run."""
    folder = tmp_path_factory.mktemp("together")
    started = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    printed(BOTH, write(folder), folder, json.dumps(RUNS), **started)
    reports = zip(*(json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(2)), strict=True)
    return folder, {name: list(each) for name, each in zip(RUNS, reports, strict=True)}


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.xdist_group("stream in two processes")  # started once, by one worker
@pytest.mark.parametrize("name", RUNS)
def test_two_do_what_one_does(name: str, together: tuple[Path, dict[str, list[str]]], tmp_path: Path) -> None:
    """With three batches, one process has two of them."""
    folder, told = together
    scheme, algorithm, activations = RUNS[name]
    recipe, options = {"embed": "int8", "*": scheme}, {"algorithm": algorithm, "activations": activations}
    report = Stream(empty(), folder / "model", tmp_path, recipe, batches=batches()[:3], **options).run()
    assert told[name][0] == told[name][1]
    assert hashes(folder / name) == hashes(tmp_path)
    assert all(f'\\"{layer.name}\\"' in told[name][0] for layer in report.layers)


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
