"""linear that dequantizes the weight with the device's own kernel, then calls PyTorch's dense product.

For any number of rows this reads the codes once and moves ``Costs.moved`` more bytes per weight. A fused kernel, which
unpacks as it multiplies, reads the codes again for every ``rows_per_pass`` rows, and its arithmetic is slower than the
library's. Counting bytes alone, the dense product wins from

    rows_per_pass * (1 + moved / bytes of a code)

rows on: an estimate from the shape of the kernels, not a measurement. Without a fused kernel to beat this is pointless:
the generic kernel does the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from bitport.backends.aten import count
from bitport.numerics import NUMBER_TYPES
from bitport.ops.select import CHOOSERS


class Costs(NamedTuple):
    layouts: tuple[str, ...]
    """Layouts that have a fused kernel."""
    rows_per_pass: int
    """Rows of x that the fused kernel computes each time it reads the weight."""
    moved: int
    """Bytes moved per weight to dequantize it: one fused pass writes it once and reads it once, 4 bytes in bf16."""


def least_rows(costs: Costs, dtype: str) -> int:
    return round(costs.rows_per_pass * (1 + 8 * costs.moved / NUMBER_TYPES[dtype].bits))


def refuses(costs: Costs, x: Tensor, *rest: Any) -> str | None:
    dtype, layout = rest[4], rest[9]
    if layout not in costs.layouts:
        return f"it overtakes the kernel of {', '.join(costs.layouts)}; the weight is in layout {layout}"
    rows, least = count(x), least_rows(costs, dtype)
    return f"making {dtype} dense pays from {least} rows on; x has {rows}" if rows < least else None


def run(x: Tensor, *rest: Any) -> Tensor:
    *weight, bias = rest
    return product(x, CHOOSERS["dequantize"](*weight, x.dtype), bias)


def product(x: Tensor, dense: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply by a weight in x's dtype. x is made contiguous for the reason that the generic kernel of linear has."""
    return F.linear(x.contiguous(), dense, None if bias is None else bias.to(x.dtype))
