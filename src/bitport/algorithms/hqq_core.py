"""Half-quadratic quantization: scale and zero point of each block from a robust loss, without any data.

    minimize over scale s, zero z    sum over the block of |x - s (code - z)|^p,    p < 1

A norm below 1 forgives the few elements that clip and asks that all others lie close. It is not convex; half-quadratic
splitting puts an outlier e beside the error and alternates, beta growing:

    code    nearest of x for the present s, z
    e       shrink(error) = sign(error) max(0, |error| - |error|^(p-1) / beta), error in units of s
    s, z    least squares: x - s e against s (code - z)

Without a zero point s alone is fitted, against the decoded codes. A whole zero point is rounded, then s is fitted once
more. Every step is judged by the loss of what would be stored; each block keeps the best it saw, the start included.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitport.algorithms.parts import Params, block_sum, choose, scale_as_stored
from bitport.numerics import Format, block_scale, choose_qparams, dequantize_codes, expand, quantize_codes

P, BETA, GROWTH = 0.7, 10.0, 1.05


def solve(x: Tensor, fmt: Format, steps: int = 20, p: float = P) -> Params:
    x = x.float() if fmt.scale != "input" else x
    params = best = Params(*choose_qparams(x, fmt))
    exact, (n, k) = x.float(), x.shape[-2:]
    least: Tensor | None = None
    beta = BETA
    for step in range(steps + 1):
        codes = quantize_codes(x, fmt, *params)
        error = exact - dequantize_codes(codes, fmt, *params)
        loss = block_sum(error.abs() ** p, fmt)
        if least is None:
            least = loss
        else:
            better = loss < least
            best, least = choose(better, params, best), loss.where(better, least)
        if step < steps:
            scale = expand(block_scale(params.scale, params.scale2), fmt.block, n, k)
            outlier = scale * _shrink(error / scale, p, beta)
            params = _fit(exact - outlier, codes, fmt, params)
            beta *= GROWTH
    return best


def _shrink(error: Tensor, p: float, beta: float) -> Tensor:
    size = error.abs()
    return error.sign() * (size - size.clamp(min=1e-8) ** (p - 1) / beta).clamp(min=0)


def _fit(target: Tensor, codes: Tensor, fmt: Format, old: Params) -> Params:
    """Least squares of ``target`` against the codes, per block; a block with nothing to fit keeps what it has."""
    if old.zero is None:
        unit = Params(torch.ones_like(block_scale(old.scale)), None, None)
        return Params(_scale(target, dequantize_codes(codes, fmt, *unit), old, fmt), None, old.scale2)
    values, count = codes.float(), block_sum(torch.ones_like(target), fmt)
    n, k = target.shape[-2:]
    mean_target, mean_code = block_sum(target, fmt) / count, block_sum(values, fmt) / count
    centred = values - expand(mean_code, fmt.block, n, k)
    slope = block_sum(centred * target, fmt) / block_sum(centred.square(), fmt)
    slope = torch.where(slope.isfinite() & (slope > 0), slope, old.scale.float())
    zero = (mean_code - mean_target / slope).clamp(0, fmt.number.qmax)
    zero = (zero.round() if fmt.zero == "int" else zero).to(old.zero.dtype)
    return Params(_scale(target, values - expand(zero.float(), fmt.block, n, k), old, fmt), zero, None)


def _scale(target: Tensor, values: Tensor, old: Params, fmt: Format) -> Tensor:
    """The factor of ``values`` that comes closest to ``target``, as it is stored."""
    factor = block_sum(values * target, fmt) / block_sum(values.square(), fmt)
    kept = block_scale(old.scale, old.scale2)
    return scale_as_stored(torch.where(factor.isfinite() & (factor > 0), factor, kept), old)
