"""Scales that an algorithm found, kept fixed while the weight is trained.

The code of a value is what it rounds to under these scales, however the range of the weight evolves::

    code = clamp(round(value / pre_scale / scale) + zero)

The algorithm's codes are thus preserved as long as each value stays within the cell of its code: what rounds to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from bitport.errors import ArgumentError
from bitport.numerics import Format, Quantized, from_storage, quantize_codes, to_storage
from bitport.numerics.format import SCALE_DTYPES
from bitport.numerics.packing import as_bytes, from_bytes
from bitport.schemes import Target
from bitport.tensor import QTensor
from bitport.tensor.qtensor import rows_of

BISECTIONS = 12
"""Bisection steps between the middle of a cell and the value outside it."""


class Fixed(NamedTuple):
    """As the parts of a QTensor: blocks along [.., N, K], regardless of the orientation of the tensor."""

    scale: Tensor
    zero: Tensor | None = None
    scale2: Tensor | None = None
    pre_scale: Tensor | None = None

    def rounded(self, rows: Tensor, fmt: Format) -> Quantized:
        """Quantize ``rows`` [.., N, K], which are already divided by the pre-scale."""
        parts = self.scale, self.zero, self.scale2
        return Quantized(to_storage(quantize_codes(rows, fmt, *parts), fmt.number), *parts)

    def as_bytes(self) -> Fixed:
        """View 8-bit floats as bytes, for formats that do not support all of them: pickle, safetensors."""
        return self.map(as_bytes)

    def from_bytes(self, fmt: Format) -> Fixed:
        return self._replace(scale=from_bytes(self.scale, SCALE_DTYPES[fmt.scale]))

    def map(self, fn: Callable[[Tensor], Tensor]) -> Fixed:
        return Fixed(*(None if part is None else fn(part) for part in self))  # type: ignore[arg-type]

    def of_matrices(self, take: Callable[[Tensor], Tensor]) -> Fixed:
        """Select matrices of a batch by ``take``; all share one pre-scale."""
        return self._replace(**{**self._replace(pre_scale=None).map(take)._asdict(), "pre_scale": self.pre_scale})

    def of_rows(self, start: int, end: int, block: int) -> Fixed:
        """Select rows, which must be aligned to blocks of ``block``."""
        return self._narrowed(-2, start // block, -(-end // block))

    def of_columns(self, start: int, end: int, block: int) -> Fixed:
        pre_scale = None if self.pre_scale is None else self.pre_scale[start:end]
        return self._narrowed(-1, start // block, -(-end // block))._replace(pre_scale=pre_scale)

    def _narrowed(self, dim: int, start: int, end: int) -> Fixed:
        zero = None if self.zero is None else self.zero.narrow(dim, start, end - start)
        return self._replace(scale=self.scale.narrow(dim, start, end - start), zero=zero)


def fixed_of(q: QTensor) -> Fixed:
    return Fixed(*q.plain()[1:], q.pre_scale)


def inside_cells(value: Tensor, q: QTensor, target: Target) -> Tensor:
    """Return ``value``, with each element that does not round to its code in ``q`` moved to the nearest point in the
    cell of that code, towards the value that ``q`` represents. ArgumentError if the cell has no number of its dtype."""
    fmt, fixed, value = q.scheme.weight, fixed_of(q), value.detach()
    codes, middle = from_storage(q.plain().data, fmt.number, q.matrix.k), q.dequantize(torch.float32)

    def outside(values: Tensor) -> Tensor:
        rows = rows_of(values, target.kind, target.transposed)
        rows = rows if fixed.pre_scale is None else rows / fixed.pre_scale
        other = quantize_codes(rows, fmt, fixed.scale, fixed.zero, fixed.scale2) != codes
        return (other.mT if target.transposed else other).reshape(values.shape)

    def at(share: Tensor) -> Tensor:
        return torch.where(share == 0, middle, middle + (value - middle) * share).to(value.dtype)

    moved = outside(value)
    inner, outer = torch.zeros_like(middle), torch.ones_like(middle)  # shares of the way that bracket the cell's end
    if missed := int((moved & outside(at(inner))).sum()):
        raise ArgumentError(
            f"{target.name}: {missed} of its codes are of numbers that {value.dtype} cannot tell apart; cast the model "
            f"to float32 before prepare_"
        )
    for _ in range(BISECTIONS):
        between = (inner + outer) / 2
        beyond = outside(at(between))
        inner, outer = torch.where(beyond, inner, between), torch.where(beyond, between, outer)
    return torch.where(moved, at(inner), value)
