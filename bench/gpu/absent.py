"""Compile kernels for GPUs that are not present, without launching them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from bitport.backends.triton import configs

TARGETS = {
    "sm70": GPUTarget("cuda", 70, 32),
    "sm75": GPUTarget("cuda", 75, 32),
    "sm80": GPUTarget("cuda", 80, 32),
    "sm89": GPUTarget("cuda", 89, 32),
    "sm90": GPUTarget("cuda", 90, 32),
    "sm100": GPUTarget("cuda", 100, 32),
    "sm103": GPUTarget("cuda", 103, 32),
    "sm120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
SHARED = {
    **{"sm70": 96 << 10, "sm75": 64 << 10, "sm80": 163 << 10, "sm90": 227 << 10, "sm100": 227 << 10},
    **{"sm89": 99 << 10, "sm103": 227 << 10, "sm120": 99 << 10},
    **{"gfx942": 64 << 10, "gfx950": 160 << 10},
}
"""Maximum bytes of shared memory per program."""


class Absent:
    """A driver that only supports compilation."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def table(name: str) -> configs.Config:
    return configs.for_architecture(configs.shipped(name), name)


@contextlib.contextmanager
def compiling(target: str) -> Iterator[list[CompiledKernel]]:
    """Compile launched kernels for the target, according to its shipped table, and append them to the list. Only for
    processes dedicated to this: triton's driver is not restored afterwards."""
    made: list[CompiledKernel] = []
    seen: set[JITFunction] = set()
    run, config = JITFunction.run, table(target)

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> CompiledKernel:
        if self not in seen:
            self.device_caches.clear()
            seen.add(self)
        made.append(run(self, *args, grid=grid, warmup=True, **options))
        return made[-1]

    def of(device: torch.device) -> configs.Config:
        return config

    triton.runtime.driver.set_active(Absent(TARGETS[target]))
    with mock.patch.object(JITFunction, "run", compile_only), mock.patch.object(configs, "of", of):
        yield made
