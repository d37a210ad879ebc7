"""The instruction sets of x86 that programs are compiled for, by the names of its ABI."""

from __future__ import annotations

import contextlib
import functools
import platform
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from bitport.errors import ArgumentError, ExportError

LEVELS = {"x86-64-v4": 512, "x86-64-v3": 256}
"""And the bits of their vectors."""
RUN_BY = {"x86-64-v4": ("AVX512",), "x86-64-v3": ("AVX512", "AVX2"), "": ()}
"""What torch calls the processors that can run a level; "" stands for other machines than x86."""


def best_level() -> str:
    """The highest of LEVELS that this machine runs; none on other machines."""
    if platform.machine() != "x86_64":
        return ""
    found = torch.backends.cpu.get_cpu_capability()
    able = [level for level in LEVELS if found in RUN_BY[level]]
    if not able:
        raise ExportError(f"programs are compiled for x86 with AVX2 at least; this machine has {found}")
    return able[0]


def check_level(level: str | None) -> str:
    """The level to compile for. A package is tried where it is made, so this machine must run it."""
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
    """Inductor compiles for ``level`` and for what else this machine has (VNNI, BF16, AMX), which others of that level
    may lack; none of its options says otherwise. Meanwhile it knows of the level's instructions alone."""
    if not level:
        yield
        return
    from torch._inductor import cpu_vec_isa

    with mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", return_value=[_instructions(level)]):
        yield


@functools.cache
def _instructions(level: str) -> Any:
    from torch._inductor import cpu_vec_isa

    widest = {512: cpu_vec_isa.VecAVX512, 256: cpu_vec_isa.VecAVX2}[LEVELS[level]]

    class OfLevel(widest):  # type: ignore[misc,valid-type]
        def __bool__(self) -> bool:
            """Not to be tried here, which is where AVX512 finds BF16 beside itself."""
            return True

    return OfLevel()
