"""Check that a device can hold and compute a scheme, by trying it once on a tiny matrix."""

from __future__ import annotations

import functools

import torch

from bitport.errors import DeviceError
from bitport.numerics import dequantize, fake_quantize, quantize
from bitport.schemes import Scheme


def check_device(scheme: Scheme, device: torch.device) -> None:
    """Raise DeviceError unless ``device`` can quantize to ``scheme``, dequantize it and round an input for it."""
    if device.type == "meta" or torch._guards.detect_fake_mode() is not None:
        return  # no computation happens there
    check_present(device)
    try:
        _try(scheme, device)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        hint = "Quantize on the CPU, or choose another scheme"
        raise DeviceError(f"{device} cannot hold {scheme}: {reason}. {hint}") from error


def computing_device(device: torch.device | str | int | None) -> torch.device:
    """The device to compute on, by default the CPU, with its number if its kind has them, since cuda alone equals none.
    DeviceError if this machine lacks it, or if it holds no numbers."""
    if device is None:
        return torch.device("cpu")
    check_present(device)
    found = torch.empty(0, device=device).device
    if found.type == "meta":
        raise DeviceError("meta holds no numbers; give a device that computes, such as cuda or cpu")
    return found


def check_present(device: torch.device | str | int) -> None:
    """Raise DeviceError unless this machine has ``device``. torch raises one of three errors if built without it."""
    try:
        torch.empty(0, device=device)
    except (AssertionError, ImportError, RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise DeviceError(f"no device {device} here: {reason}. `bitport doctor` lists those there are") from error


@functools.cache
def _try(scheme: Scheme, device: torch.device) -> None:
    """Try the scheme. Success is cached; an error, which may be out of memory, is not."""
    value = torch.ones(2, 32, device=device, dtype=torch.float32)
    parts = quantize(value, scheme.weight)
    dequantize(parts, scheme.weight, 2, 32)
    if scheme.act:
        scale = torch.ones(1, 1, dtype=torch.float32, device=device) if scheme.static else None
        fake_quantize(value, scheme.act, scale)
