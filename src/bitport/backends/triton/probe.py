"""Check whether Triton can be used: what it needs, which can be seen at any time, and whether it compiles for this
machine's device, which initializes the device."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess

import torch
import triton
import triton.language as tl

from bitport.backends.triton.fusion import FUSED

OLDEST = (3, 6)
"""The oldest supported version of Triton."""


def missing() -> str | None:
    """Return what Triton lacks to compile anything, or None."""
    found = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if found < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return f"triton {triton.__version__} is too old: {oldest} or later is needed; PyTorch's own build brings one"
    compilers = (os.environ.get("CC"), shutil.which("gcc"), shutil.which("clang"))
    if os.name != "nt" and not any(compilers):  # for Windows Triton brings one
        return "triton needs a C compiler: install gcc or clang, or name another one in the environment variable CC"
    return None


@functools.cache
def fault() -> str | None:
    """Return why Triton compiles nothing for this machine's device, or None: it does not support every chip that
    PyTorch runs on. Triton caches the compiled kernel on disk."""
    try:
        _store.warmup(torch.int32, grid=(1,), **FUSED)
    except (RuntimeError, OSError, subprocess.CalledProcessError, triton.TritonError) as error:
        return f"triton compiles nothing for this device: {type(error).__name__}: {error}"
    return None


@triton.jit
def _store(out: tl.tensor) -> None:
    tl.store(out, 1)
