"""linear by a dense weight: made by the device's kernel for ``dequantize``, multiplied by PyTorch's own product.

Whatever the number of rows, this reads the codes once and moves ``Costs.moved`` bytes per weight beside them. A kernel
that unpacks as it multiplies reads the codes again for every ``rows_per_pass`` rows, and its arithmetic is slower than
the library's. Counted in bytes alone, the dense weight is ahead from

    rows_per_pass * (1 + moved / bytes of a code)

rows on: an estimate from the shape of the kernels, not a measurement.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from bitport.numerics import NUMBER_TYPES
from bitport.ops.select import CHOOSERS


class Costs(NamedTuple):
    rows_per_pass: int
    """Rows of x that the device's packed kernels serve with one reading of the weight."""
    moved: int
    """Bytes per weight that making it dense moves: in one fused pass it is written once and read once, 4 in bf16."""
    products: tuple[str, ...] = ()
    """Layouts whose kernel unpacks the weight once for any number of rows: nothing is to be gained there."""


def least_rows(costs: Costs, dtype: str) -> int:
    return round(costs.rows_per_pass * (1 + 8 * costs.moved / NUMBER_TYPES[dtype].bits))


def refuses(costs: Costs, x: Tensor, *rest: Any) -> str | None:
    dtype, k, layout = rest[4], rest[6], rest[9]
    if layout in costs.products:
        return f"the kernel that reads layout {layout} unpacks the weight once for any number of rows"
    rows, least = x.numel() // max(1, k), least_rows(costs, dtype)
    return f"making {dtype} dense pays from {least} rows on; x has {rows}" if rows < least else None


def run(x: Tensor, *rest: Any) -> Tensor:
    *weight, bias = rest
    dense = CHOOSERS["dequantize"](*weight, x.dtype)
    return F.linear(x, dense, None if bias is None else bias.to(x.dtype))
