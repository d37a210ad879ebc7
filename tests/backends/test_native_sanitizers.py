"""The native kernels under the address and the undefined behaviour sanitizer."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAKE, COMPILER = shutil.which("make"), shutil.which("g++") or shutil.which("clang++")


@pytest.mark.slow
@pytest.mark.skipif(not (MAKE and shutil.which("g++")), reason="make and g++ are needed")
def test_no_fault_is_found_in_steps_of_optimizers() -> None:
    command = ["make", "-s", "-C", ROOT, "sanitize-step", f"VENV={Path(sys.executable).parents[1]}"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.skipif(not (MAKE and COMPILER), reason="make and g++ or clang++ are needed")
def test_no_fault_is_found() -> None:
    ran = subprocess.run(["make", "-s", "-C", ROOT, "sanitize"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-8000:]
    cases = re.search(r"(\d+) cases, .*: no fault", ran.stdout)
    assert cases, ran.stdout
    assert int(cases[1]) > 10_000
