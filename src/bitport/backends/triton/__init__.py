"""Kernels in Triton, one source for CUDA, ROCm and XPU. Triton is imported only if there is such a device."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import torch

DEVICES = ("cuda", "xpu")


def device() -> torch.device | None:
    """Return this machine's accelerator if the kernels support its type."""
    here = torch.accelerator.current_accelerator(check_available=True)
    return here if here is not None and here.type in DEVICES else None


def missing() -> str | None:
    """Return why the kernels are not available here, or None."""
    if device() is None:
        return f"no device of type {' or '.join(DEVICES)} here"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton (for XPU it comes with PyTorch's own build)"
    from bitport.backends.triton import probe

    return probe.fault()


MISSING = missing()
if (DEVICE := device()) is not None and MISSING is None:
    from bitport.backends.triton import kernels

    kernels.register(DEVICE.type)


def tune() -> Iterator[str]:
    """Measure block sizes and crossovers for ``bitport tune``."""
    if DEVICE is None or MISSING is not None:
        yield f"nothing to choose between: {MISSING}"
        return
    from bitport.backends.triton import measure

    yield from measure.tune(torch.device(DEVICE.type, torch.accelerator.current_device_index()))


def describe() -> list[str]:
    """Describe the table in use for ``bitport doctor``."""
    if DEVICE is None or MISSING is not None:
        return [f"not used: {MISSING}"]
    from bitport.backends.triton import configs

    table = configs.of(DEVICE)
    left = table.content.get("unmeasured")
    return [
        f"blocks and crossovers of {configs.architecture(DEVICE)}: {table.source}",
        *([f"bitport tune was stopped before {', '.join(left)}; run it again to go on"] if left else []),
    ]
