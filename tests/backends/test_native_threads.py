"""The native kernels with torch's threads, and in other threads and processes."""

from __future__ import annotations

import ctypes
import multiprocessing
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bitport.backends import cpu
from bitport.backends.cpu.dispatcher import TORCH
from bitport.ops.product import operand
from tests.backends.taken import BF16, compiled, linear, takes, tiles
from tests.scripts import printed

pytestmark = compiled


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def test_many_python_threads_at_once(two_threads: None) -> None:
    args = [torch.randn(32, 512, dtype=BF16), *operand(tiles("int4-g32", 256, 512)), None]
    expected = linear(*args)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(20):
            if not torch.equal(linear(*args), expected):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_other_python_threads_run_meanwhile() -> None:
    """A thread that wakes every half millisecond does so during one call of some tens of milliseconds."""
    x, weight, woken, done = torch.randn(1024, 2048, dtype=BF16), tiles("int4-g32", 2048, 2048), 0, threading.Event()

    def wake() -> None:
        nonlocal woken
        while not done.wait(0.0005):
            woken += 1

    thread = threading.Thread(target=wake)
    thread.start()
    before = woken
    takes(lambda: F.linear(x, weight))
    during = woken - before
    done.set()
    thread.join()
    assert during >= 3


def test_within_a_parallel_region_of_torch_it_runs_alone(two_threads: None) -> None:
    args = [torch.randn(32, 512, dtype=BF16), *operand(tiles("int4-g32", 256, 512)), None]
    expected, same = linear(*args), []
    body = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    run = body(lambda begin, end, _: same.extend(torch.equal(linear(*args), expected) for _ in range(begin, end)))
    i64 = ctypes.c_int64
    assert ctypes.CDLL(str(TORCH)).torch_parallel_for(i64(0), i64(8), i64(1), run, None) == 0
    assert same == [True] * 8


def _child(args: list[Any], expected: torch.Tensor) -> None:
    torch.set_num_threads(1)  # as PyTorch's data loader does: threads of the pool do not survive the fork
    sys.exit(0 if torch.equal(linear(*args), expected) else 1)


def test_a_forked_process(two_threads: None) -> None:
    args = [torch.randn(32, 512, dtype=BF16), *operand(tiles("int4-g32", 256, 512)), None]
    process = multiprocessing.get_context("fork").Process(target=_child, args=(args, linear(*args)))
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_threads_are_as_many_as_torch_has() -> None:
    """The process has no threads beyond torch's own pool."""
    script = """
import os, torch, bitport as bp, torch.nn.functional as F
torch.set_num_threads(1)
weight, x = bp.quantize_tensor(torch.randn(512, 512), bp.preset("int4-g32")), torch.randn(64, 512)
for threads in (1, 2):
    torch.set_num_threads(threads)
    before = len(os.listdir("/proc/self/task"))
    F.linear(x, weight)
    ours = len(os.listdir("/proc/self/task"))
    F.linear(x, torch.randn(512, 512)); (torch.randn(1 << 22) + 1).sum()
    print(ours - before, len(os.listdir("/proc/self/task")) - ours)
"""
    assert printed(script).splitlines() == ["0 0", "1 0"]


def test_a_library_that_is_not_loaded_is_a_reason() -> None:
    script = """
import ctypes, sys
from pathlib import Path
library = ctypes.CDLL(sys.argv[1])
library.bitport_register_torch.restype = ctypes.c_char_p
print(library.bitport_register_torch(b"/nowhere/libtorch_cpu.so").decode())
"""
    path = Path(cpu.__file__).with_name("libbitport_kernels.so")
    assert printed(script, path).strip() == "libtorch_cpu is not loaded in this process from the path given"
