"""Helpers shared by the searches: scales as a format stores them, and the values that they represent."""

from __future__ import annotations

import torch
from torch import Tensor

from bitport.algorithms.pieces import by_rows
from bitport.numerics import (
    Format,
    Params,
    Quantized,
    dequantize_codes,
    encode,
    number_type,
    quantize_codes,
    to_storage,
)
from bitport.numerics.packing import as_bytes

E4M3 = number_type("float8_e4m3")


def rounded(x: Tensor, fmt: Format, params: Params) -> Tensor:
    """float32 [..., N, K]: x rounded to the nearest values that ``params`` can represent."""
    return by_rows(lambda part, its: dequantize_codes(quantize_codes(part, fmt, *its), fmt, *its), x, fmt, params)


def codes_of(x: Tensor, fmt: Format, params: Params) -> Tensor:
    """uint8 [..., N, K]: those of the nearest values that ``params`` can represent."""
    return by_rows(lambda part, its: quantize_codes(part, fmt, *its), x, fmt, params)


def stored(codes: Tensor, fmt: Format, params: Params) -> Quantized:
    return Quantized(to_storage(codes, fmt.number), *params)


def choose(better: Tensor, tried: Params, best: Params) -> Params:
    """``tried`` in the blocks marked ``better``, ``best`` elsewhere; both share one global scale."""
    zero = None if best.zero is None or tried.zero is None else torch.where(better, tried.zero, best.zero)
    return Params(_where(better, tried.scale, best.scale), zero, best.scale2)


def _where(mask: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """torch.where for dtypes that include the 8-bit floats, which it does not support on every device."""
    return torch.where(mask, as_bytes(first), as_bytes(second)).view(first.dtype)


def scale_as_stored(raw: Tensor, like: Params) -> Tensor:
    """Convert float32 block scales [..., SN, SK] to the stored dtype of ``like``; e8m0 is not supported."""
    dtype = like.scale.dtype
    if dtype == torch.float8_e4m3fn:
        steps = raw if like.scale2 is None else raw / like.scale2
        return encode(steps.clamp(E4M3.smallest, E4M3.max), E4M3).view(dtype)
    return raw.clamp(max=torch.finfo(dtype).max).to(dtype)
