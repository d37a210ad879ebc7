"""Using bitport from several threads at once, from the first call on."""

from __future__ import annotations

import concurrent.futures
import copy
import importlib
import os
import sys
import types

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import BaseTorchDispatchMode

import bitport
from bitport.ops.select import FORCED
from tests.scripts import ended

FIRST_CALLS = """
import threading, torch, bitport
layers, x, errors = [torch.nn.Linear(96, 64) for _ in range(8)], torch.randn(3, 96), []
def work(layer):
    bitport.quantize_(layer, "int4-g32")
    error = (layer(x) - torch.nn.functional.linear(x, layer.weight.dequantize(), layer.bias)).abs().max()
    errors.append(float(error.detach()))
threads = [threading.Thread(target=work, args=(layer,)) for layer in layers]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(errors) == 8 and max(errors) < 1e-5, errors
"""


def test_the_first_calls_of_a_process_are_those_of_several_threads() -> None:
    """Guards against "partially initialized module 'torch.distributed.tensor' has no attribute 'DTensor'"."""
    done = ended(FIRST_CALLS)
    assert (done.returncode, done.stderr) == (0, "")


LOOKED_FOR = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch.utils.flop_counter")


@pytest.mark.parametrize("name", LOOKED_FOR)
def test_a_module_that_another_thread_is_importing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in sys.modules, but still empty."""
    for each in LOOKED_FOR:  # torch imports one from the other
        importlib.import_module(each)
    model, x = nn.Linear(96, 64), torch.randn(3, 96)
    wanted = bitport.quantize_(copy.deepcopy(model), "int8-dyn").bytes_after
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert bitport.quantize_(model, "int8-dyn").bytes_after == wanted
    with BaseTorchDispatchMode():
        assert model(x).shape == (3, 64)


@pytest.mark.parametrize("scheme", ["int4-g32", "int8-dyn", "fp8-row", "nvfp4"])
def test_one_model_serves_many(scheme: str) -> None:
    model = nn.Sequential(nn.Linear(96, 128), nn.GELU(), nn.Linear(128, 64))
    bitport.quantize_(model, scheme)
    fresh, inputs = copy.deepcopy(model), [torch.randn(at % 9 + 1, 96) for at in range(64)]
    wanted = [model(x) for x in inputs]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        got = list(pool.map(fresh, inputs))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, wanted, strict=True))


def test_kernels_are_forced_in_several_threads() -> None:
    """Each block forces until its own end, however they overlap, and nothing stays forced."""
    layer, x = nn.Linear(96, 64), torch.randn(3, 96)
    bitport.quantize_(layer, "int4-g32")
    wanted = layer(x)
    with bitport.use_kernel("generic"):
        generic = layer(x)

    def work(at: int) -> bool:
        with bitport.use_kernel("linear=generic" if at % 2 else "generic"):
            return torch.equal(layer(x), generic)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(400)))
    assert torch.equal(layer(x), wanted)
    assert FORCED == {}


FORKED = """
import os, signal, sys, torch, bitport
torch.set_num_threads(1)
layer, x = torch.nn.Linear(1024, 1024), torch.randn(64, 1024)
bitport.quantize_(layer, sys.argv[1])
with torch.no_grad():
    wanted = layer(x)
    torch.set_num_threads(2)
    layer(x)  # makes the threads that the new process lacks
    child = os.fork()
    if not child:
        signal.alarm(60)  # ends a process that hangs
        torch.set_num_threads(1)
        os._exit(not torch.equal(layer(x), wanted))
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not copy processes")
@pytest.mark.parametrize("scheme", ["int4", "int8-dyn"])
def test_a_copied_process_computes_with_one_thread(scheme: str) -> None:
    """As docs/troubleshooting.md says, for what hangs there otherwise, in PyTorch too."""
    done = ended(FORKED, scheme)
    assert (done.returncode, done.stderr) == (0, "")
