"""linear by ``aten::_weight_int4pack_mm`` on MPS, which has only its name and shapes in common with CUDA's.

The Metal kernel reads the weight as rows of bytes [N, K/2] with the even k in the low nibble, as layout int4_pairs
stores it; the 4-D int32 shape that PyTorch asks for is only a view. Scales must have x's dtype: the kernel reads them
as such without checking. It also rounds z - 8 s, the value of code 0, to that dtype, and the error is many times that
of a rounded weight. A weight with a zero point, where z is not 0, is therefore multiplied in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitport.backends.aten import empty, finish, rows
from bitport.numerics import FLOATS


def refuses(*args: Any) -> str | None:
    x, _, scale, _, _, dtype, n, _, _, _, layout, _ = args
    if layout != "int4_pairs":
        return f"the weight must be int4 in layout int4_pairs, not {dtype} in layout {layout}"
    if x.dtype not in FLOATS or scale.dtype != x.dtype:
        return f"scale and x must be of one dtype, not {scale.dtype} and {x.dtype}"
    return empty(x, n)


def run(x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, *rest: Any) -> Tensor:
    n, k, group = rest[2], rest[3], rest[5]
    dtype = x.dtype if zero is None else torch.float32
    shaped = data.view(torch.int32).view(n // 8, k // 32, 32, 1)
    y = torch._weight_int4pack_mm(rows(x).to(dtype), shaped, group, scale.to(dtype))
    return finish(y, x, rest[-1])
