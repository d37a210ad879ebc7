"""SmoothQuant for a block: per-channel scales for schemes that also round the input."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from bitport.algorithms.block import Block, BlockWeight
from bitport.algorithms.scales_core import Found
from bitport.algorithms.scaling import Scaling
from bitport.algorithms.smooth_core import Factor, search
from bitport.arguments import check_options


@dataclasses.dataclass(frozen=True)
class Smooth(Scaling):
    """SmoothQuant: as :class:`AWQ`, for schemes that round the input, whose large channels pass their size on to the
    weight.

    ``steps``, ``least_gain``: as for :class:`AWQ`. ``rows``: the number of inputs, from the first batches, on which the
    error is measured.
    """

    rows: int = 512
    name: ClassVar[str] = "smooth"
    needs_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_options(self, rows=1)

    def refuses(self, weight: BlockWeight) -> str | None:
        if not weight.scheme.act:
            return f"{weight.scheme} does not round the input"
        return super().refuses(weight)

    def factor(self, block: Block, name: str, channels: Tensor) -> Factor:
        value, scheme = block.value(name), block.weights[name].scheme
        return Factor(value, scheme.weight, scheme.act, block.rows(name, self.rows), channels.to(value.device))

    def search(self, factors: Sequence[Factor], shape: tuple[int, ...]) -> Found:
        return search(factors, shape, self.steps)
