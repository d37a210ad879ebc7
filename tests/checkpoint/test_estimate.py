"""The memory estimate is sufficient, and not above what the work needs: measured in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bitport.algorithms import algorithm
from bitport.backends import cpu
from bitport.backends.cpu.native import Library
from bitport.checkpoint.quantize import estimate, planned
from bitport.checkpoint.source import Source
from bitport.report.memory import ROUNDED, WORK, resident
from tests.scripts import printed
from tests.turns import slow

N, K = 8192, 2048
PEAK = """
import json, sys, torch
from bitport.checkpoint.quantize import QuantizeRun
torch.set_num_threads(2)
run = QuantizeRun(sys.argv[1], sys.argv[2], sys.argv[3], algorithm=sys.argv[4])
report = run.run()
print(json.dumps([report.memory_estimate, report.memory_peak, run.memory.base]))
"""


@pytest.mark.skipif(not resident(), reason="measures memory by /proc")
@pytest.mark.parametrize(
    ("scheme", "algorithm", "kernels"),
    [
        ("int4", "rtn", True),
        ("mxfp6", "rtn", False),
        *slow(("int8", "rtn", True), ("nvfp4", "rtn", True), ("int3", "hqq", True)),
    ],
)
def test_the_peak_is_below_what_was_foretold(tmp_path: Path, scheme: str, algorithm: str, kernels: bool) -> None:
    """The estimate for rounding by a kernel is a fraction of that for a search."""
    native = kernels and isinstance(cpu.LIBRARY, Library)
    weight = torch.randn(N, K).bfloat16()
    save_file({"a.weight": weight, "b.weight": weight.clone()}, tmp_path / "m.safetensors")
    given = (tmp_path / "m.safetensors", tmp_path / "out", scheme, algorithm)
    foretold, taken, base = json.loads(printed(PEAK, *given, BITPORT_DISABLE="" if native else "cpu"))
    assert taken <= foretold
    work = foretold - base - weight.nbytes - (128 << 20)
    assert work == N * K * (4 if native and algorithm == "rtn" else 32)


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=["as stored", "cast"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_it_consists_of(device: str, dtype: torch.dtype | None, tmp_path: Path) -> None:
    """The most demanding tensor is not always the largest: here a table, which stays as it is, has more bytes. On
    another device a weight is in float and searched there, and its codes come back."""
    tensors = {
        "small.weight": torch.zeros(16, 32, dtype=torch.bfloat16),
        "large.weight": torch.zeros(64, 32, dtype=torch.bfloat16),
        "rope.table": torch.zeros(3000, dtype=torch.int64),
    }
    save_file(tensors, tmp_path / "m.safetensors")
    files = Source(tmp_path / "m.safetensors")
    found = estimate(files, planned(files, "int4-g32"), dtype, algorithm("hqq"), torch.device(device))
    elements = 64 * 32
    floats = elements * (2 + 4 if dtype else 2)
    if device == "cpu":
        assert (found.weights, found.work, found.on_device, found.device) == (floats, elements * WORK, 0, None)
        return
    assert (found.on_device, found.device) == (elements * (4 if dtype else 2) + elements * WORK, torch.device("cuda"))
    assert floats + elements * ROUNDED < 3000 * 8
    assert (found.weights, found.work) == (3000 * 8, 0)
