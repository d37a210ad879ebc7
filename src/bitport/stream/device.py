"""Batches and activations of a model that runs on a device: kept in host memory or files, and moved batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from bitport.calibrate.batches import each_once
from bitport.calibrate.store import Store, Tensors


class Batches(Sequence[Any]):
    """``batches``, each moved to ``device`` when it is asked for."""

    def __init__(self, batches: Sequence[Any], device: torch.device) -> None:
        self.batches, self.device = batches, device

    def __len__(self) -> int:
        return len(self.batches)

    @overload
    def __getitem__(self, at: int) -> Any: ...

    @overload
    def __getitem__(self, at: slice) -> Batches: ...

    def __getitem__(self, at: int | slice) -> Any:
        if isinstance(at, slice):
            return Batches(self.batches[at], self.device)
        return each_once(lambda leaf: leaf.to(self.device) if isinstance(leaf, Tensor) else leaf, self.batches[at])


class Apart:
    """A Store whose tensors come from ``device`` and return to it, while ``store`` keeps them on the CPU. What the
    model itself has on the CPU, such as lengths of sequences, is returned there."""

    def __init__(self, store: Store, device: torch.device) -> None:
        self.store, self.device = store, device
        self.here: dict[tuple[str, int], set[int]] = {}

    def put(self, step: str, batch: int, tensors: Tensors) -> None:
        self.here[step, batch] = {at for at, tensor in tensors.items() if tensor.device.type == "cpu"}
        self.store.put(step, batch, {at: tensor.cpu() for at, tensor in tensors.items()})

    def get(self, step: str, batch: int) -> Tensors:
        here = self.here.get((step, batch), set())
        held = self.store.get(step, batch)
        return {at: tensor if at in here else tensor.to(self.device) for at, tensor in held.items()}

    def drop(self, step: str) -> None:
        self.store.drop(step)

    def holds(self, step: str) -> bool:
        return self.store.holds(step)
