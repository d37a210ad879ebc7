"""Rounding to nearest with the best of several ranges per block."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from bitport.algorithms.block_params import codes_of, stored
from bitport.algorithms.clip_core import search
from bitport.arguments import check_options
from bitport.calibrate.inputs import Inputs
from bitport.numerics import Format, Quantized


@dataclasses.dataclass(frozen=True)
class Clip:
    """Choose the range of each block by the third powers of the errors of its weights; no data needed. If inputs are
    known, by the squares of the errors, each column weighted by the mean square of its inputs, plus ``damping`` times
    the average of that over all columns."""

    damping: float = 0.01
    name: ClassVar[str] = "clip"
    needs_inputs: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_options(self, damping=0.0)

    def refuses(self, fmt: Format, kind: str) -> str | None:
        return None

    def solve(self, w: Tensor, fmt: Format, inputs: Inputs | None = None) -> Quantized:
        importance = None
        if inputs is not None:
            squares = inputs.gram.to(w.device).diagonal(dim1=-2, dim2=-1)
            importance = squares + self.damping * squares.mean(-1, keepdim=True)
        params = search(w, fmt, importance)
        return stored(codes_of(w, fmt, params), fmt, params)
