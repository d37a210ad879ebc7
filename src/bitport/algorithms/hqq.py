"""Half-quadratic quantization of a weight."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from bitport.algorithms.block_params import codes_of, stored
from bitport.algorithms.hqq_core import P, solve
from bitport.arguments import check_options
from bitport.calibrate.inputs import Inputs
from bitport.numerics import Format, Quantized


@dataclasses.dataclass(frozen=True)
class HQQ:
    """Half-quadratic quantization: fits scale and zero point to the p-norm of the error, which for ``p`` below 1 makes
    most errors small, as far as the sum of their fourth powers, and so the largest, do not grow; no data needed.
    ``steps``: iterations at most."""

    steps: int = 20
    p: float = P
    name: ClassVar[str] = "hqq"
    needs_inputs: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_options(self, steps=0, p=0.0)

    def refuses(self, fmt: Format, kind: str) -> str | None:
        return "hqq fits scales, but those of this format are powers of two" if fmt.scale == "e8m0" else None

    def solve(self, w: Tensor, fmt: Format, inputs: Inputs | None = None) -> Quantized:
        params = solve(w, fmt, self.steps, self.p)
        return stored(codes_of(w, fmt, params), fmt, params)
