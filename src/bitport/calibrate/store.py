"""Where the tensors that go from block to block wait: in memory, or wherever else a Store keeps them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

Tensors = dict[int, Tensor]
"""Some leaves of a call or of an output, by their place among all of them."""

GIVEN = ""
"""The step of what blocks are given besides the output of the block before; every other step is named after the block
whose output it is."""


class Store(Protocol):
    def put(self, step: str, batch: int, tensors: Tensors) -> None: ...

    def get(self, step: str, batch: int) -> Tensors: ...

    def drop(self, step: str) -> None:
        """That step is not asked for any more."""

    def holds(self, step: str) -> bool:
        """Whether the outputs of that block are there for every batch, from this run or from one that ended early."""


class Memory:
    """Of the outputs only the newest are kept: those of a batch take the place of those that they were made from."""

    def __init__(self) -> None:
        self.given: dict[int, Tensors] = {}
        self.outputs: dict[int, Tensors] = {}

    def put(self, step: str, batch: int, tensors: Tensors) -> None:
        (self.given if step == GIVEN else self.outputs)[batch] = tensors

    def get(self, step: str, batch: int) -> Tensors:
        return (self.given if step == GIVEN else self.outputs)[batch]

    def drop(self, step: str) -> None:
        if step == GIVEN:
            self.given.clear()

    def holds(self, step: str) -> bool:
        return False
