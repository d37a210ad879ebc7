"""Check whether Triton can compile for this machine's device: it needs a C compiler, and does not support every chip
that PyTorch runs on."""

from __future__ import annotations

import subprocess

import torch
import triton
import triton.language as tl

from bitport.backends.triton.fusion import FUSED

OLDEST = (3, 6)
"""The oldest supported version of Triton."""


def fault() -> str | None:
    """Return why Triton cannot be used, or None. Triton caches the compiled probe on disk."""
    found = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if found < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return f"triton {triton.__version__} is too old: {oldest} or later is needed; PyTorch's own build brings one"
    try:
        _store.warmup(torch.int32, grid=(1,), **FUSED)
    except (RuntimeError, OSError, subprocess.CalledProcessError, triton.TritonError) as error:
        return f"triton compiles nothing for this device: {type(error).__name__}: {error}"
    return None


@triton.jit
def _store(out: tl.tensor) -> None:
    tl.store(out, 1)
