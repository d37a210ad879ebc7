"""dyn_linear by ``aten::_int_mm`` with the factors swapped: on the CPU its first one may be unsigned, so the weight's
codes go in as they lie, offset and all, and the offset is taken off the exact int32 sums::

    sum of (code - 128) * xq  =  sum of code * xq  -  128 * sum of xq

Needs VNNI: without it PyTorch's int8 product sums neighbouring products in 16 bits, which can overflow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitport.backends.aten import int_mm
from bitport.layouts.signed_int8 import to_signed
from bitport.numerics import quantize_rows

VNNI: bool = torch.cpu._is_vnni_supported()


def refuses(*args: Any) -> str | None:
    return int_mm.refuses("plain", *args) or (None if VNNI else "this processor has no VNNI")


def run(x: Tensor, data: Tensor, scale: Tensor, *rest: Any) -> Tensor:
    *_, act, act_scale, bias = rest
    q = quantize_rows(x, act, act_scale)
    codes = to_signed(q.data)
    sums = torch._int_mm(data, codes.t()).sub_(128 * codes.sum(1, dtype=torch.int32))
    y = sums.float().mul_(scale.float().reshape(-1, 1)).mul_(q.scale.reshape(1, -1))
    if bias is not None:
        y += bias.float().reshape(-1, 1)
    return y.to(x.dtype).t().contiguous().reshape(*x.shape[:-1], data.shape[0])
