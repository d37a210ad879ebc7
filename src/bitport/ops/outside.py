"""Devices of other libraries, whose tensors never reach PyTorch's dispatcher. Neither the dispatcher nor the tables of
kernels and layouts know what computes there, so their backend describes it."""

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
"""Device type -> function that imports the library, or raises DeviceError; filled by backends."""


def outside(device: torch.device | str | int) -> Outside | None:
    """The description of ``device``; None if PyTorch's dispatcher handles it."""
    plugins.load()
    bring = OUTSIDE.get(str(device).partition(":")[0])
    return None if bring is None else bring()
