"""Kernels in Triton, one source for CUDA, ROCm and XPU. Triton is imported only if there is such a device, and only a
tensor on the device initializes it: a process that works on the CPU takes no memory of a GPU, and may fork."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import torch

from bitport.ops import Missing, register_missing

DEVICES = ("cuda", "xpu")
OPS = (
    *("linear", "dyn_linear", "grouped_linear", "dyn_grouped_linear"),
    *("embedding", "dequantize", "attention", "quantize_input", "quantize"),
)
"""The ops with kernels here."""
AFTER_PYTORCHS = -1
"""Priority: PyTorch's own kernels, which refuse by the table, are asked first, whatever the order of imports."""


def device() -> torch.device | None:
    """Return this machine's accelerator if the kernels support its type. Devices are counted, which the driver's
    management library does; asking whether they are available would initialize CUDA."""
    here = torch.accelerator.current_accelerator()
    return here if here is not None and here.type in DEVICES and torch.accelerator.device_count() else None


DEVICE = device()


def missing() -> str | None:
    """Return why the kernels are not available here, or None."""
    if DEVICE is None:
        return f"no device of type {' or '.join(DEVICES)} here"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'bitport[triton]' (for XPU it comes with PyTorch's own build)"
    from bitport.backends.triton import probe

    return probe.missing()


MISSING = missing()
if DEVICE is not None and MISSING is None:
    from bitport.backends.triton import kernels, probe

    kernels.register(DEVICE.type, probe.fault)
elif DEVICE is not None and MISSING is not None:
    register_missing(Missing("triton", DEVICE.type, OPS, MISSING, AFTER_PYTORCHS))


def unusable() -> str | None:
    """Return why the kernels cannot run here, or None. Unlike :func:`missing` it initializes the device."""
    return MISSING or probe.fault()


def tune() -> Iterator[str]:
    """Measure block sizes and crossovers for ``bitport tune``."""
    if reason := unusable():
        yield f"nothing to choose between: {reason}"
        return
    from bitport.backends.triton import measure

    yield from measure.tune(current())


def describe() -> list[str]:
    """Describe the table in use for ``bitport doctor``."""
    if reason := unusable():
        return [f"not used: {reason}"]
    from bitport.backends.triton import configs

    table = configs.of(current())
    left = table.content.get("unmeasured")
    return [
        f"blocks and crossovers of {configs.architecture(current())}: {table.source}",
        *([f"bitport tune was stopped before {', '.join(left)}; run it again to go on"] if left else []),
    ]


def current() -> torch.device:
    return torch.device(torch.accelerator.current_device_index())
