"""The programs of native/, built once for all tests of a checkout."""

from __future__ import annotations

import fcntl
import functools
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
LIBRARIES = Path(torch.__path__[0]) / "lib"


@functools.cache
def runner() -> Path:
    """Build bitport-run, embed, mutate and skewed, and return their folder. Parallel workers take turns by a lock."""
    if not shutil.which("cmake") or not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        pytest.skip("cmake and a C++ compiler are needed")
    folder = ROOT / "build" / "tests-runner"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        options = ["-DCMAKE_BUILD_TYPE=None", f"-DTORCH_LIB={LIBRARIES}"]
        run("cmake", "-S", str(ROOT / "native" / "runner"), "-B", str(folder), *options)
        run("cmake", "--build", str(folder), "--parallel", "2")
    return folder


def run(*command: str) -> str:
    """What ``command`` says; it must not fail."""
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def nvcc() -> str:
    """NVIDIA's compiler; skips the test where there is none."""
    found = shutil.which("nvcc")
    if found is None:
        pytest.skip("needs NVIDIA's compiler, nvcc, on the PATH")
    return found


def assembled(text: str, architecture: str, folder: Path) -> str:
    """Compile CUDA C++ for one architecture; return what the assembler says, such as how many bytes it spills."""
    file, options = folder / "kernel.cu", ("-std=c++17", "-Xptxas", "-v", "-cubin")
    file.write_text(text)
    target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    return run(nvcc(), target, *options, "-o", str(folder / "out"), str(file))
