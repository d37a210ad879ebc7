"""Storage for tensors passed from block to block: in memory, or wherever a Store keeps them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

Tensors = dict[int, Tensor]
"""Some leaves of a call or an output, by index among all its leaves."""

GIVEN = ""
"""The step of block inputs other than the previous block's output; every other step is named after the block whose
output it is."""


class Store(Protocol):
    def put(self, step: str, batch: int, tensors: Tensors) -> None: ...

    def get(self, step: str, batch: int) -> Tensors: ...

    def drop(self, step: str) -> None:
        """Discard a step that will not be read again."""

    def holds(self, step: str) -> bool:
        """Whether the outputs of that block exist for every batch, from this run or an interrupted one."""


class InMemory:
    """Keeps only the latest outputs: those of a batch replace the ones that they were computed from."""

    def __init__(self) -> None:
        self.given: dict[int, Tensors] = {}
        self.outputs: dict[int, Tensors] = {}

    def put(self, step: str, batch: int, tensors: Tensors) -> None:
        (self.given if step == GIVEN else self.outputs)[batch] = tensors

    def get(self, step: str, batch: int) -> Tensors:
        return (self.given if step == GIVEN else self.outputs)[batch]

    def drop(self, step: str) -> None:
        """No-op: the next outputs replace these."""

    def holds(self, step: str) -> bool:
        return False
