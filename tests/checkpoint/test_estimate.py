"""The memory estimate is sufficient, and not above what the work needs: measured in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bitport.backends import cpu
from bitport.backends.cpu.native import Library
from bitport.report.memory import resident
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
