"""``torch.sim``: the functions that PyTorch requires of a device's Python module."""

from __future__ import annotations

import torch


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return int(torch.ops.simdev.device_count())


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(index: int) -> None:
    torch.accelerator.set_device_index(index)


class device:
    """Context manager that makes a device current."""

    def __init__(self, wanted: torch.device | int) -> None:
        self.index = wanted if isinstance(wanted, int) else wanted.index

    def __enter__(self) -> None:
        self.before = current_device()
        if self.index is not None:
            set_device(self.index)

    def __exit__(self, *raised: object) -> None:
        set_device(self.before)


def synchronize(device: torch.device | int | None = None) -> None:
    """Do nothing: the device is synchronous."""


def manual_seed_all(seed: int) -> None:
    """Do nothing: random numbers are generated on the CPU."""


def get_rng_state(device: torch.device | int | None = None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: torch.device | int | None = None) -> None:
    torch.set_rng_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]
