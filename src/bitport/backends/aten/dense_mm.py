"""linear by a dense weight: made by the device's kernel for ``dequantize``, multiplied by PyTorch's own product.

Whatever the number of rows, this reads the codes once and moves ``Costs.moved`` bytes per weight beside them. A kernel
that unpacks as it multiplies reads the codes again for every ``rows_per_pass`` rows, and its arithmetic is slower than
the library's. Counted in bytes alone, the dense weight is ahead from

    rows_per_pass * (1 + moved / bytes of a code)

rows on: an estimate from the shape of the kernels, not a measurement. Where no such kernel is to be overtaken, this has
nothing to add to the generic kernel, which does the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from bitport.numerics import NUMBER_TYPES
from bitport.ops.select import CHOOSERS


class Costs(NamedTuple):
    layouts: tuple[str, ...]
    """Those whose kernel unpacks as it multiplies."""
    rows_per_pass: int
    """Rows of x that this kernel serves with one reading of the weight."""
    moved: int
    """Bytes per weight that making it dense moves: in one fused pass it is written once and read once, 4 in bf16."""


def least_rows(costs: Costs, dtype: str) -> int:
    return round(costs.rows_per_pass * (1 + 8 * costs.moved / NUMBER_TYPES[dtype].bits))


def refuses(costs: Costs, x: Tensor, *rest: Any) -> str | None:
    dtype, k, layout = rest[4], rest[6], rest[9]
    if layout not in costs.layouts:
        return f"it overtakes the kernel of {', '.join(costs.layouts)}; the weight is in layout {layout}"
    rows, least = x.numel() // max(1, k), least_rows(costs, dtype)
    return f"making {dtype} dense pays from {least} rows on; x has {rows}" if rows < least else None


def run(x: Tensor, *rest: Any) -> Tensor:
    *weight, bias = rest
    dense = CHOOSERS["dequantize"](*weight, x.dtype)
    return F.linear(x.contiguous(), dense, None if bias is None else bias.to(x.dtype))  # as the generic kernel
