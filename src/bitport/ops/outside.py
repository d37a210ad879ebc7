"""Devices of other libraries, such as torchax, whose tensors PyTorch's dispatcher never sees: not the tables of kernels
and layouts, but their backend says what computes there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from bitport import plugins


@dataclasses.dataclass(frozen=True)
class Outside:
    """A device of another library, as the conformance suite uses it."""

    name: str
    """Device and library, as shown in a table of results."""
    library: str
    """Name and version of the library."""
    kernels: Mapping[str, Callable[..., Any]]
    """Every way of computing there, by name: (op's name, its arguments on the CPU) -> its result, back on the CPU."""
    refuses: Callable[..., str | None]
    """(op's name, its arguments) -> why the device does not support the call, or None."""


OUTSIDE: dict[str, Callable[[], Outside]] = {}
"""By device type: a function that imports the library and describes the device, or raises DeviceError. Backends add
theirs."""


def outside(device: torch.device | str | int) -> Outside | None:
    """The description of ``device``; None if PyTorch's dispatcher handles it."""
    plugins.load()
    bring = OUTSIDE.get(str(device).partition(":")[0])
    return None if bring is None else bring()
