"""GPTQ of a weight: one matrix after the other, each with the inputs that it saw."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from bitport.algorithms.clip_core import search
from bitport.algorithms.gptq_core import solve
from bitport.algorithms.parts import Params, batch_of, stored
from bitport.calibrate.inputs import Inputs
from bitport.numerics import Format, Quantized, choose_qparams, quantize

KINDS = ("linear", "experts", "attention")


@dataclasses.dataclass(frozen=True)
class GPTQ:
    """``damping``, ``block`` and ``sort``: as in :mod:`bitport.algorithms.gptq_core`. ``clip``: search the ranges of
    the blocks first, each column weighted by the mean square of its inputs."""

    damping: float = 0.01
    block: int = 128
    sort: bool = True
    clip: bool = True
    name: ClassVar[str] = "gptq"
    needs_inputs: ClassVar[bool] = True

    def refuses(self, fmt: Format, kind: str) -> str | None:
        return None if kind in KINDS else f"gptq needs a product, not the weight of a module of kind {kind}"

    def solve(self, w: Tensor, fmt: Format, inputs: Inputs | None) -> Quantized:
        assert inputs is not None
        if w.dim() > 2:
            return batch_of([self.solve(matrix, fmt, inputs[at]) for at, matrix in enumerate(w)])
        if not inputs.any_rows:
            return quantize(w, fmt)
        hessian = inputs.gram.to(w.device)
        power = hessian.diagonal() + self.damping * hessian.diagonal().mean()
        chosen = search(w, fmt, power) if self.clip else choose_qparams(w, fmt)
        params = Params(*chosen)
        codes = solve(w, hessian, fmt, params, self.damping, self.block, self.sort)
        return stored(codes, fmt, params)
