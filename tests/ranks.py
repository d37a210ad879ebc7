"""Run checks in several processes over loopback, with one start for all checks of a module.

A module of checks has functions ``check_*(mesh)``. Every process runs all of them in order of definition, and waits
after each one until the others have finished it too. A process with a failed check exits, and the others then fail at
their next communication with it: processes that disagree about what comes next would wait for each other.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bitport import plugins
from tests.turns import slow

WORLDS = (*slow(2), 3)
"""Numbers of processes: what divides evenly between two of them does not among three."""
SECONDS, LIMIT = 20, 120
"""Limit in seconds for one collective, and for all checks of a module together."""


def names(module: str) -> list[str]:
    return [name for name in vars(importlib.import_module(module)) if name.startswith("check_")]


def must_pass(check: str, module: str, world: int, folder: Path | None = None) -> None:
    """Fail with what went wrong in ``check``. The first one that is asked for starts the processes for all of them."""
    if wrong := run(module, world, folder)[check]:
        pytest.fail(wrong, pytrace=False)


@functools.cache
def run(module: str, world: int, folder: Path | None = None) -> dict[str, str]:
    """Return the result of each check of ``module`` in ``world`` processes: "" or what went wrong. ``folder``: the
    working directory of the checks, where they find files from earlier runs and may leave their own."""
    with tempfile.TemporaryDirectory() as meeting:
        command = [sys.executable, "-m", "tests.ranks", module, str(world), meeting, str(folder or meeting)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "BITPORT_CACHE": os.devnull}
        with subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as all_of_them:
            try:
                said = all_of_them.communicate(timeout=LIMIT)[1]
            except subprocess.TimeoutExpired:
                said = f"it took longer than {LIMIT} seconds"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(all_of_them.pid, signal.SIGKILL)
        results = [Path(meeting) / f"{rank}.json" for rank in range(world)]
        if missing := [rank for rank, path in enumerate(results) if not path.exists()]:
            return dict.fromkeys(names(module), f"processes {missing} ended early: {said}")
        every = [json.loads(path.read_text()) for path in results]
    return {
        name: "\n".join(filter(None, (found.get(name, "not run: an earlier check failed") for found in every)))
        for name in names(module)
    }


def main(module: str, world: int, meeting: str, folder: str) -> None:
    """Fork only after everything is imported, since importing takes longer than the checks."""
    torch.set_num_threads(1)
    for each in (module, "torch._dynamo"):  # torch would otherwise import the latter in every process
        importlib.import_module(each)
    plugins.load()
    os.chdir(folder)
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=checked, args=(module, world, meeting, rank)) for rank in range(world)]
    for process in started:
        process.start()
    for process in started:
        process.join()


def checked(module: str, world: int, meeting: str, rank: int) -> None:
    torch.set_num_threads(1)  # torch's pool does not outlive the fork; threads that ask first for a new one may race
    store = dist.FileStore(os.path.join(meeting, "store"), world)
    limit = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    found: dict[str, str] = {}
    for name in names(module):
        found[name] = outcome(module, name, init_device_mesh("cpu", (world,)))
        store.set(f"{name} {rank}", found[name] or "passed")
        if found[name] or any(store.get(f"{name} {other}") != b"passed" for other in range(world)):
            break
    Path(meeting, f"{rank}.json").write_text(json.dumps(found))


def outcome(module: str, name: str, mesh: DeviceMesh) -> str:
    torch.manual_seed(0)
    try:
        getattr(importlib.import_module(module), name)(mesh)
    except BaseException:  # the test must hear of anything (DCP's own is no Exception)
        return f"process {dist.get_rank()}: {traceback.format_exc()}"
    return ""


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
