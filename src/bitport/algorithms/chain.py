"""Several steps combined into one algorithm: float transforms of the model around its weights, then one solver."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from bitport.algorithms.algorithm import Algorithm
from bitport.algorithms.block import Transform
from bitport.calibrate.inputs import Inputs
from bitport.numerics import Format, Quantized


@dataclasses.dataclass(frozen=True)
class Chain:
    """Apply ``transforms`` in order, first to the whole model, then block by block, then ``solver`` to each weight.
    ``name``: the text that the chain was requested by."""

    transforms: tuple[Transform, ...]
    solver: Algorithm
    name: str
    needs_inputs: ClassVar[bool] = True

    def refuses(self, fmt: Format, kind: str) -> str | None:
        return self.solver.refuses(fmt, kind)

    def solve(self, w: Tensor, fmt: Format, inputs: Inputs | None) -> Quantized:
        return self.solver.solve(w, fmt, inputs)
