"""The limits of a GPU, measured in the same run: copying memory, and the best products of its library.

A copy reads and writes every byte; both count. The lower bound of a product is that of ``bench.limits``; float8 inputs
have a separate unit, which other products cannot use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from bench.gpu.accelerator import Accelerator
from bench.limits import Limits

BYTES = 1 << 30
SIZE = 8192
TIMES = 5


@dataclasses.dataclass(frozen=True)
class GpuLimits(Limits):
    float8: float = 0.0
    """Operations per second of the float8 unit; 0 if there is none."""
    why: dict[str, str] = dataclasses.field(default_factory=dict)
    """Unit -> why it has no figure."""


def measure(gpu: Accelerator, nbytes: int = BYTES, size: int = SIZE, times: int = TIMES) -> GpuLimits:
    """Measure each limit, taking the best of ``times``."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=gpu.device).random_()
    target = torch.empty_like(source)
    copied = 2 * nbytes / _best(gpu, lambda: target.copy_(source), times)
    units: dict[str, float] = {}
    why: dict[str, str] = {}
    for name, make in PRODUCTS.items():
        try:
            run = make(gpu.device, size)
            units[name] = 2 * size**3 / _best(gpu, run, times)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            why[name] = str(error).strip().splitlines()[0][:200]
    return GpuLimits(copied, {name: units[name] for name in units if name != "float8"}, units.get("float8", 0.0), why)


def _best(gpu: Accelerator, run: Callable[[], object], times: int) -> float:
    return min(gpu.seconds(run) for _ in range(times))


def _bf16(device: torch.device, size: int) -> Callable[[], Tensor]:
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    return lambda: a @ b.t()


def _int8(device: torch.device, size: int) -> Callable[[], Tensor]:
    a, b = (torch.randint(-128, 128, (size, size), dtype=torch.int8, device=device) for _ in range(2))
    return lambda: torch._int_mm(a, b.t())


def _float8(device: torch.device, size: int) -> Callable[[], Tensor]:
    a, b = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)


PRODUCTS = {"bf16": _bf16, "int8": _int8, "float8": _float8}
