"""The x86 instruction sets that programs are compiled for, named by the psABI levels."""

from __future__ import annotations

import contextlib
import functools
import platform
import threading
from collections.abc import Iterator
from typing import Any

import torch

from bitport.errors import ArgumentError, ExportError

LEVELS = {"x86-64-v4": 512, "x86-64-v3": 256}
"""Level -> vector width in bits."""
RUN_BY = {"x86-64-v4": ("AVX512",), "x86-64-v3": ("AVX512", "AVX2"), "": ()}
"""The CPU capabilities, as reported by torch, that can run a level; "" is for machines other than x86."""
_ONE_AT_A_TIME = threading.RLock()
"""Held by a thread while it compiles for a level: what torch finds out about the machine is one for all threads."""


def best_level() -> str:
    """The highest of LEVELS that this machine supports; "" on machines other than x86."""
    if platform.machine() != "x86_64":
        return ""
    found = torch.backends.cpu.get_cpu_capability()
    able = [level for level in LEVELS if found in RUN_BY[level]]
    if not able:
        raise ExportError(f"programs are compiled for x86 with AVX2 at least; this machine has {found}")
    return able[0]


def check_level(level: str | None) -> str:
    """Return the level to compile for. A package is tested where it is built, so this machine must support it."""
    if level is None:
        return best_level()
    if level not in LEVELS:
        raise ArgumentError(f"unknown level {level!r}; known: {', '.join(LEVELS)}")
    if torch.backends.cpu.get_cpu_capability() not in RUN_BY[level]:
        raise ArgumentError(
            f"a package is tried where it is made, and this machine does not run {level}: choose "
            f"{best_level() or 'no level, which are those of x86'}, or export on a machine that does"
        )
    return level


@contextlib.contextmanager
def nothing_beyond(level: str) -> Iterator[None]:
    """Restrict Inductor to the instructions of ``level``. It would also use other features of this machine (VNNI, BF16,
    AMX), which other machines of that level may lack, and has no option against that."""
    if not level:
        yield
        return
    from torch._inductor import cpu_vec_isa

    with _ONE_AT_A_TIME:
        known = cpu_vec_isa.valid_vec_isa_list
        cpu_vec_isa.valid_vec_isa_list = lambda: [_instructions(level)]  # type: ignore[assignment]
        try:
            yield
        finally:
            cpu_vec_isa.valid_vec_isa_list = known


@functools.cache
def _instructions(level: str) -> Any:
    from torch._inductor import cpu_vec_isa

    widest = {512: cpu_vec_isa.VecAVX512, 256: cpu_vec_isa.VecAVX2}[LEVELS[level]]

    class OfLevel(widest):  # type: ignore[misc,valid-type]
        def __bool__(self) -> bool:
            """Skip the test compilation, by which AVX512 would also detect BF16."""
            return True

    return OfLevel()
