"""dyn_linear by ``aten::_int_mm`` with swapped operands: on the CPU its first one may be unsigned, so the weight's
codes are passed as stored, with their offset, which is then subtracted from the exact int32 sums::

    sum of (code - 128) * xq  =  sum of code * xq  -  128 * sum of xq

Needs VNNI: without it PyTorch's int8 product adds adjacent products in 16 bits, which can overflow.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from bitport.backends.aten import int_mm
from bitport.numerics import quantize_rows
from bitport.numerics.packing import to_signed

VNNI: bool = torch.cpu._is_vnni_supported()


@functools.cache
def takes_unsigned() -> bool:
    """Whether this version of PyTorch multiplies unsigned bytes; 2.11 requires both operands to be signed."""
    one = functools.partial(torch.zeros, (2, 2), device="cpu")
    try:
        torch._int_mm(one(dtype=torch.uint8), one(dtype=torch.int8))
    except RuntimeError:
        return False
    return True


def refuses(*args: Any) -> str | None:
    if reason := int_mm.refuses("plain", *args):
        return reason
    if not VNNI:
        return "this processor has no VNNI"
    return None if takes_unsigned() else f"_int_mm of PyTorch {torch.__version__} takes no unsigned bytes"


def run(x: Tensor, data: Tensor, scale: Tensor, *rest: Any) -> Tensor:
    *_, act, act_scale, bias = rest
    q = quantize_rows(x, act, act_scale)
    codes = to_signed(q.data)
    sums = torch._int_mm(data, codes.t()).sub_(128 * codes.sum(1, dtype=torch.int32))
    y = sums.float().mul_(scale.float().reshape(-1, 1)).mul_(q.scale.reshape(1, -1))
    if bias is not None:
        y += bias.float().reshape(-1, 1)
    return y.to(x.dtype).t().contiguous().reshape(*x.shape[:-1], data.shape[0])
