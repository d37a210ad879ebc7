"""linear by ``aten::_weight_int8pack_mm(x [M, K], int8 [N, K], scale [N])``, which reads the stored weight directly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitport.backends.aten import empty, finish, rows


def refuses(layout: str, *args: Any) -> str | None:
    x, _, scale, zero, scale2, dtype, n, k, block_n, block_k, its_layout, _ = args
    if dtype != "int8" or zero is not None or scale2 is not None:
        return "the weight must be int8 without zero point"
    if block_k < k or block_n != 1:
        return f"scales must be one per row, not per {block_n}x{block_k} block"
    if its_layout != layout:
        return f"the weight must be in layout {layout}, not {its_layout}"
    if scale.dtype != x.dtype:
        return f"scale and x must be of one dtype, not {scale.dtype} and {x.dtype}"
    return empty(x, n)


def run(x: Tensor, data: Tensor, scale: Tensor, *rest: Any) -> Tensor:
    scale = scale.reshape(-1).contiguous()  # a slice of columns has strides, which PyTorch ignores
    return finish(torch._weight_int8pack_mm(rows(x), data, scale), x, rest[-1])
