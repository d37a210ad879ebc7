"""The interface of an algorithm, a way to choose the codes and scales of a weight. The result is an ordinary quantized
weight of the scheme, so layouts, kernels and checkpoints are unaffected by the choice."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor

from bitport.calibrate.inputs import Inputs
from bitport.numerics import Format, Quantized, quantize


@runtime_checkable
class Algorithm(Protocol):
    """Chooses the codes and scales of a weight."""

    @property
    def name(self) -> str:
        """The name shown in reports."""

    needs_inputs: ClassVar[bool]
    """Whether it looks at the inputs of a weight and therefore requires calibration data."""

    def refuses(self, fmt: Format, kind: str) -> str | None:
        """Return why weights of this format and kind of target are rounded to nearest instead, or None."""

    def solve(self, w: Tensor, fmt: Format, inputs: Inputs | None) -> Quantized:
        """Quantize w [.., N, K]. ``inputs``: the calibration inputs of each matrix, None only if ``needs_inputs`` is
        False. A matrix may have none (``inputs.rows`` is 0), such as an expert that no token was routed to: round it to
        nearest."""


@dataclasses.dataclass(frozen=True)
class RTN:
    """Round to nearest, taking the range of each block from its largest elements."""

    name: ClassVar[str] = "rtn"
    needs_inputs: ClassVar[bool] = False

    def refuses(self, fmt: Format, kind: str) -> str | None:
        return None

    def solve(self, w: Tensor, fmt: Format, inputs: Inputs | None = None) -> Quantized:
        return quantize(w, fmt)
