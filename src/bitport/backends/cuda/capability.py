"""What a CUDA device can do, as far as kernels depend on it."""

from __future__ import annotations

import functools

import torch

ROCM = (0, 0)
"""Stands for a ROCm device, whose type is cuda too."""
NOT_ROCM = "this kernel was written for NVIDIA devices, and this one runs ROCm"


@functools.cache
def of(device: torch.device) -> tuple[int, int]:
    """Compute capability of ``device``: (9, 0) is sm90."""
    return ROCM if torch.version.hip else torch.cuda.get_device_capability(device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Most bytes that a block can have, from sm80 on: those of a multiprocessor less 1 KiB that CUDA reserves."""
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor - 1024


@functools.cache
def toolkit() -> tuple[int, int]:
    """The version of CUDA that PyTorch was built with."""
    major, _, minor = (torch.version.cuda or "0.0").partition(".")
    return int(major), int(minor.partition(".")[0] or 0)


def below(device: torch.device, major: int, minor: int) -> str | None:
    """Return why ``device`` does not satisfy sm{major}{minor}, or None."""
    have = of(device)
    if have == ROCM:
        return NOT_ROCM
    return None if have >= (major, minor) else f"it needs sm{major}{minor}; {device} is sm{have[0]}{have[1]}"


def other_than(device: torch.device, *majors: int) -> str | None:
    """Return why ``device`` belongs to none of the generations ``majors``, or None."""
    have = of(device)
    if have == ROCM:
        return NOT_ROCM
    names = " or ".join(f"sm{major}x" for major in majors)
    return None if have[0] in majors else f"it runs on {names} alone; {device} is sm{have[0]}{have[1]}"


def built_before(major: int, minor: int) -> str | None:
    """Return why PyTorch's build does not satisfy CUDA {major}.{minor}, or None."""
    have = toolkit()
    if have >= (major, minor):
        return None
    return f"it needs a PyTorch built with CUDA {major}.{minor} or newer, not {have[0]}.{have[1]}"
