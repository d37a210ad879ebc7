"""linear and int4pack_mm by ``aten::_weight_int4pack_mm``, the tinygemm kernel: bf16 x int4 in tile-packed layouts.

The layouts already enforce the kernel's limits (group, K, dtype of the scale) and pad N to a multiple of 8. They store
a zero point as a bfloat16 shift, so a weight with one is rounded twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitport.backends.aten import empty, finish, rows
from bitport.backends.cuda import capability


def refuses(*args: Any) -> str | None:
    x, dtype, n, layout = args[0], args[5], args[6], args[10]
    if not layout.startswith("tile_packed_"):
        wanted = "tile packed int4 (bfloat16 scales per group of 32 to 256)"
        return f"the weight must be {wanted}, not {dtype} in layout {layout}"
    if x.dtype != torch.bfloat16:
        return f"x must be bfloat16, not {x.dtype}"
    return empty(x, n) or capability.below(x.device, 8, 0)


def run(x: Tensor, data: Tensor, scale: Tensor, *rest: Any) -> Tensor:
    n, group = rest[3], rest[6]
    y = torch._weight_int4pack_mm(rows(x), data, group, scale)[:, :n].contiguous()
    return finish(y, x, rest[-1])


def as_is_refuses(x: Tensor, mat2: Tensor, group: int, scales_and_zeros: Tensor) -> str | None:
    """bitport's op of that name has the same contract and has checked the rest of it."""
    if not mat2.is_contiguous():
        return "mat2 must be contiguous"
    return empty(x, mat2.shape[0]) or capability.below(x.device, 8, 0)


def as_is(x: Tensor, mat2: Tensor, group: int, scales_and_zeros: Tensor) -> Tensor:
    return torch._weight_int4pack_mm(rows(x), mat2, group, scales_and_zeros.contiguous())
