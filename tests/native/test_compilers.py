"""Installing compiles the kernels with clang++ where there is no g++ (setup.py)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"
SOURCES = sorted(path for folder in ("kernels", "torch", "shim") for path in (NATIVE / folder).glob("*.cpp"))
CLANG = shutil.which("clang++")


@pytest.mark.slow
@pytest.mark.skipif(CLANG is None, reason="clang++ is needed")
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_clang_takes_every_name_and_attribute(source: Path) -> None:
    """Compiled to code, not only checked for syntax: only code generation finds what a target attribute lacks."""
    command = [CLANG, "-std=c++17", "-Werror=ignored-attributes", "-c", "-o", os.devnull, source]
    ran = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]
