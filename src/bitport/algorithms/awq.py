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
    """Scales the columns of each weight up where inputs are large, and its input down, so that the outputs of the
    rounded weight stay closest; the model's other parameters absorb the scales.

    ``steps``: the exponents alpha that are tried are multiples of 1 / ``steps``. ``least_gain``: dB by which the
    output has to improve where no parameter can absorb the scale, so that the input is multiplied at run time."""

    name: ClassVar[str] = "awq"

    def factor(self, block: Block, name: str, channels: Tensor) -> Factor:
        weight, value = block.weights[name], block.value(name)
        gram, rows = (each.to(value.device) for each in (weight.inputs.gram, weight.inputs.rows))
        return Factor(value, weight.scheme.weight, gram, rows, channels.to(value.device))

    def search(self, factors: Sequence[Factor], shape: tuple[int, ...]) -> Found:
        return search(factors, shape, self.steps)
