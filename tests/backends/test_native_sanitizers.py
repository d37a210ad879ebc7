"""The native kernels under the address and undefined behaviour sanitizers."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAKE, COMPILER = shutil.which("make"), shutil.which("g++") or shutil.which("clang++")
ARM = ("aarch64-linux-gnu-g++", "qemu-aarch64")


@pytest.mark.slow
@pytest.mark.skipif(not (MAKE and shutil.which("g++")), reason="make and g++ are needed")
def test_no_fault_is_found_in_steps_of_optimizers() -> None:
    command = ["make", "-s", "-C", ROOT, "sanitize-step", f"VENV={Path(sys.executable).parents[1]}"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.skipif(not (MAKE and COMPILER), reason="make and g++ or clang++ are needed")
def test_no_fault_is_found() -> None:
    ((cases, _),) = cases_of("sanitize")
    assert cases > 10_000


@pytest.mark.slow
@pytest.mark.skipif(not (MAKE and all(map(shutil.which, ARM))), reason=f"make and {' and '.join(ARM)} are needed")
def test_no_fault_is_found_on_an_emulated_arm() -> None:
    """On a processor with matrix instructions, and on one with only NEON."""
    found = cases_of("test-arm", "SANITIZE_ARGS=20")
    assert [best for _, best in found] == ["neon_matrix", "neon"]
    assert all(cases > 10_000 for cases, _ in found)


def cases_of(*targets: str) -> list[tuple[int, str]]:
    """(number of cases, best instruction set) of each run of the tests."""
    ran = subprocess.run(["make", "-s", "-C", ROOT, *targets], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-8000:]
    return [(int(cases), best) for cases, best in re.findall(r"(\d+) cases, .*, up to (\w+): no fault", ran.stdout)]
