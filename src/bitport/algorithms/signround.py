"""SignRound for a weight: learn rounding and ranges, starting from the result of another algorithm."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from bitport.algorithms.algorithm import Algorithm
from bitport.algorithms.block_params import stored
from bitport.algorithms.gptq import GPTQ, hessian_of, refused_kind
from bitport.algorithms.gptq_core import diagonal_mean
from bitport.algorithms.pieces import stacked
from bitport.algorithms.signround_core import solve
from bitport.arguments import check_options
from bitport.calibrate.inputs import Inputs
from bitport.numerics import Format, Params, Quantized, from_storage, quantize


@dataclasses.dataclass(frozen=True)
class SignRound:
    """Learns for each weight whether it is rounded up or down, and the ranges, starting from another algorithm's
    result: layer by layer, from the sum of x x^T over the inputs: ``steps`` of sign descent, then at most ``sweeps``
    of coordinate descent. ``start``: the algorithm whose codes and ranges it starts from. ``damping``: this share of
    the mean of the diagonal is added to the diagonal of the sum, so that chance correlations of few inputs count for
    less.
    ``shrinkage``: as in :func:`bitport.algorithms.gptq.hessian_of`."""

    steps: int = 200
    sweeps: int = 2
    damping: float = 0.1
    start: Algorithm = dataclasses.field(default_factory=GPTQ)
    shrinkage: float = 0.3
    name: ClassVar[str] = "signround"
    needs_inputs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_options(self, steps=0, sweeps=0, damping=0.0, shrinkage=0.0)

    def refuses(self, fmt: Format, kind: str) -> str | None:
        return refused_kind(self.name, kind) or self.start.refuses(fmt, kind)

    def solve(self, w: Tensor, fmt: Format, inputs: Inputs | None) -> Quantized:
        assert inputs is not None
        if w.dim() > 2:
            return stacked([self.solve(matrix, fmt, inputs[at]) for at, matrix in enumerate(w)])
        if not inputs.any_rows:
            return quantize(w, fmt)
        first = self.start.solve(w, fmt, inputs)
        codes = from_storage(first.data, fmt.number, w.shape[-1])
        hessian = hessian_of(inputs, self.shrinkage, w.device)
        hessian.diagonal().add_(self.damping * diagonal_mean(hessian))
        codes, params = solve(w, hessian, fmt, codes, Params(*first[1:]), self.steps, self.sweeps)
        return stored(codes, fmt, params)
