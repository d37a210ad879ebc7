"""What a CUDA device can do. The only place in bitport that asks torch.cuda."""

from __future__ import annotations

import functools

import torch


@functools.cache
def of(device: torch.device) -> tuple[int, int]:
    """(9, 0) is sm90; (0, 0) stands for a device of ROCm, which goes by the name cuda as well."""
    return (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)


def below(device: torch.device, major: int, minor: int) -> str | None:
    """Why ``device`` is not enough where sm{major}{minor} is needed, or None."""
    have = of(device)
    if have == (0, 0):
        return "this kernel was written for NVIDIA devices, and this one runs ROCm"
    return None if have >= (major, minor) else f"it needs sm{major}{minor}; {device} is sm{have[0]}{have[1]}"
