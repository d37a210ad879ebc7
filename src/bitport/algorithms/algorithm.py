"""What an algorithm is: a way to choose the codes and scales of a weight. What comes out is an ordinary quantized
weight of the scheme, so layouts, kernels and checkpoints know nothing of it."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor

from bitport.calibrate.inputs import Inputs
from bitport.numerics import Format, Quantized, quantize


@runtime_checkable
class Algorithm(Protocol):
    @property
    def name(self) -> str:
        """What reports call it."""

    needs_inputs: ClassVar[bool]
    """Whether it looks at what goes into a weight; then there must be calibration data."""

    def refuses(self, fmt: Format, kind: str) -> str | None:
        """Why weights of this format and kind of target are rounded to nearest instead."""

    def solve(self, w: Tensor, fmt: Format, inputs: Inputs | None) -> Quantized:
        """The parts of w [.., N, K]. ``inputs``: what went into each of these matrices; None is possible only where
        ``needs_inputs`` is False. Any of them may be empty (``inputs.rows`` is 0 there), as for an expert that no token
        reached: round such a matrix to nearest."""


@dataclasses.dataclass(frozen=True)
class RTN:
    """Round to nearest, the range of each block from its largest elements."""

    name: ClassVar[str] = "rtn"
    needs_inputs: ClassVar[bool] = False

    def refuses(self, fmt: Format, kind: str) -> str | None:
        return None

    def solve(self, w: Tensor, fmt: Format, inputs: Inputs | None = None) -> Quantized:
        return quantize(w, fmt)
