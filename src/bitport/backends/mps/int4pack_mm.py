"""linear by ``aten::_weight_int4pack_mm`` on MPS, which shares with CUDA's the name and the shapes, and nothing else.

The Metal kernel reads the bytes of the weight as rows [N, K/2] with the even k in the low nibble, and so does layout
int4_pairs hold them; the 4-D int32 shape that PyTorch asks for is only a view. Scales must be of x's dtype: the kernel
reads them as that without a look at what they are. It rounds z - 8 s, the value of code 0, to that dtype as well, where
an error is many times that of a rounded weight: with a zero point, which makes z, it is called in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitport.backends.aten import finish, rows
from bitport.numerics import FLOATS


def refuses(*args: Any) -> str | None:
    x, _, scale, _, _, dtype, _, _, _, _, layout, _ = args
    if layout != "int4_pairs":
        return f"the weight must be int4 in layout int4_pairs, not {dtype} in layout {layout}"
    if x.dtype not in FLOATS or scale.dtype != x.dtype:
        return f"scale and x must be of one dtype, not {scale.dtype} and {x.dtype}"
    return None if x.numel() else "x has no rows"


def run(x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, *rest: Any) -> Tensor:
    n, k, group = rest[2], rest[3], rest[5]
    dtype = x.dtype if zero is None else torch.float32
    shaped = data.view(torch.int32).view(n // 8, k // 32, 32, 1)
    y = torch._weight_int4pack_mm(rows(x).to(dtype), shaped, group, scale.to(dtype))
    return finish(y, x, rest[-1])
