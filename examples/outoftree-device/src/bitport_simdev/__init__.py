"""A simulated accelerator, ``torch.device("sim")``: host memory behind PrivateUse1, PyTorch's out-of-tree device key.

PyTorch calls :func:`register_device` when it is imported (entry point group ``torch.backends``); bitport imports
``bitport_simdev.layout`` when a device is first asked about (group ``bitport.backends``). Neither imports the other.
"""

from __future__ import annotations

import importlib.util

import torch

from bitport_simdev import device


def register_device() -> None:
    """Load the compiled extension and rename PrivateUse1 to ``sim``, with ``torch.sim`` and ``Tensor.sim()``."""
    found = importlib.util.find_spec("bitport_simdev._sim")
    if found is None or found.origin is None:
        raise ImportError("bitport_simdev lacks its compiled part; install it again, with a C++ compiler")
    torch.ops.load_library(found.origin)
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", device)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def allow_fallback(on: bool) -> None:
    """Set whether ops without a kernel here fall back to the CPU (the default) or fail."""
    torch.ops.simdev.allow_fallback(on)


def fallbacks() -> dict[str, int]:
    """Return how often each op fell back to the CPU since :func:`reset`."""
    return dict(torch.ops.simdev.fallbacks())


def kernel_calls() -> int:
    """Return how many products this device's own kernel has computed since :func:`reset`."""
    return int(torch.ops.simdev.kernel_calls())


def handed_back() -> int:
    """Return how many calls that kernel has passed to bitport's generic one since :func:`reset`."""
    return int(torch.ops.simdev.handed_back())


def reset() -> None:
    torch.ops.simdev.reset()
