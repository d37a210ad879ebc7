"""AWQ for a block: per-channel scales that preserve the outputs of rounded weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from bitport.algorithms.awq_core import Factor, search
from bitport.algorithms.block import Block
from bitport.algorithms.scales_core import Found
from bitport.algorithms.scaling import Scaling


@dataclasses.dataclass(frozen=True)
class AWQ(Scaling):
    name: ClassVar[str] = "awq"

    def factor(self, block: Block, name: str, channels: Tensor) -> Factor:
        weight, value = block.weights[name], block.value(name)
        gram, rows = (each.to(value.device) for each in (weight.inputs.gram, weight.inputs.rows))
        return Factor(value, weight.scheme.weight, gram, rows, channels.to(value.device))

    def search(self, factors: Sequence[Factor], shape: tuple[int, ...]) -> Found:
        return search(factors, shape, self.steps)
