"""Devices of other libraries, whose tensors never come to PyTorch's dispatcher: neither the dispatcher nor the tables
of kernels and layouts say what computes there. Their backend does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from bitport import plugins


@dataclasses.dataclass(frozen=True)
class Outside:
    name: str
    """Whose device it is and what computes there, for a table of results."""
    library: str
    """With its version."""
    kernels: Mapping[str, Callable[..., Any]]
    """Every way of computing there, by name: (op's name, its arguments on the CPU) -> its result, on the CPU again."""
    refuses: Callable[..., str | None]
    """(op's name, its arguments) -> why the device does not compute that, or None."""


OUTSIDE: dict[str, Callable[[], Outside]] = {}
"""By the type of the device: what imports the library, or raises DeviceError. Backends put it in."""


def outside(device: torch.device | str | int) -> Outside | None:
    """What computes on ``device``; None if PyTorch's dispatcher knows it."""
    plugins.load()
    bring = OUTSIDE.get(str(device).partition(":")[0])
    return None if bring is None else bring()
