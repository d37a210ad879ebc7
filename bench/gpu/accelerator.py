"""The GPU that the suites run on."""

from __future__ import annotations

import torch

from bitport import plugins
from bitport.backends.accelerator import Accelerator

__all__ = ["Accelerator", "present", "tables"]


def present() -> Accelerator:
    """The GPU of this machine."""
    if not torch.accelerator.is_available():
        raise SystemExit("bench.gpu needs a CUDA, ROCm or XPU device, and PyTorch finds none here")
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return Accelerator(torch.device(device.type, 0))


def tables() -> list[str]:
    """The tables by which bitport chooses blocks and kernels here, since figures depend on them."""
    return plugins.describe().get("triton", [])
