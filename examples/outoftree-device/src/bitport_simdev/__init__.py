"""A simulated accelerator, ``torch.device("sim")``: host memory behind PyTorch's key for devices from outside.

PyTorch calls :func:`register_device` when it is imported (entry point group ``torch.backends``); bitport imports
``bitport_simdev.layout`` when a device is first asked about (group ``bitport.backends``). Neither imports the other.
"""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager, contextmanager
from collections.abc import Iterator
from types import ModuleType

import torch


def register_device() -> None:
    """Load the compiled part and give PyTorch's spare device its name, ``torch.sim`` and ``Tensor.sim()``."""
    found = importlib.util.find_spec("bitport_simdev._sim")
    if found is None or found.origin is None:
        raise ImportError("bitport_simdev was installed without its compiled part; install it again with a C++ compiler")
    torch.ops.load_library(found.origin)
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", _device_module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
