"""One optimizer step on many tensors: dequantize the moments, update moments and parameters, quantize again.

    p, g    the parameter and its gradient, as float32; g is negated to maximize, and l2 * p added to it
    adam    m = b1 m + (1 - b1) g;   v = b2 v + (1 - b2) g^2;   p = d p - a (m / (sqrt(v) c + eps))
            a = lr / (1 - b1^t),  c = 1 / sqrt(1 - b2^t),  d = 1 - lr * weight decay (1 where that is part of g)
    lion    p = d p - lr sign(b1 m + (1 - b1) g);   m = b2 m + (1 - b2) g;   the sign of non-finite values is NaN
    sgd     m = b1 m + w g;   p = p - lr m,   or - lr (g + b1 m) for Nesterov's;   without m, p = p - lr g

All arithmetic is float32, each product and sum rounded separately, in the order of the code here: kernels give the same
bits, except for the square root, which PyTorch's ops round differently on some devices. The parameter is updated with
the new moments before these are rounded. A moment is a matrix of codes with a scale per block of its rows, or floats; a
code is the one nearest to x * (1 / scale), which saves a division per element. A positive second moment stays positive
(at least the smallest number of its type), because its root is a divisor: where g vanishes, m would be divided by eps
alone.

Kernels are registered for ``optimizer_step`` like those of an op, in bitport.ops.select. It is not an op of the table:
it mutates its arguments, takes no weight of a model, and occurs in no exported program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from bitport import plugins
from bitport.numerics import (
    Format,
    Quantized,
    choose_qparams,
    dequantize_now,
    from_blocks,
    spread,
    to_blocks,
    to_storage,
)
from bitport.numerics.codebooks import zero_code
from bitport.numerics.codec import nearest_codes
from bitport.numerics.stochastic import CUT, place_bits, round_stochastically
from bitport.ops.select import STEP, Impl, first_that_takes

SMALLEST = torch.finfo(torch.float32).smallest_normal
PIECE = 1 << 22
"""Elements that the generic kernel processes at a time; its temporaries take up to 50 bytes per element."""


class Moment(NamedTuple):
    """``data`` [n, bytes] and ``scale`` [n, blocks] of a matrix [n, k] in ``format``; without a format, floats of the
    parameter's shape. ``positive``: values are never negative, and positive ones are not rounded to zero."""

    data: Tensor
    scale: Tensor | None = None
    format: Format | None = None
    positive: bool = False


class Numbers(NamedTuple):
    """The constants of the formulas above for one tensor; a rule ignores those it does not use."""

    sign: float = 1.0
    l2: float = 0.0
    decay: float = 1.0
    beta1: float = 0.0
    rest1: float = 1.0
    beta2: float = 0.0
    rest2: float = 1.0
    rate: float = 0.0
    correction: float = 1.0
    eps: float = 0.0
    nesterov: float = 0.0


@dataclasses.dataclass(frozen=True)
class ParamStep:
    """A parameter with what one step needs. ``keys``: of the random bits for stochastic rounding of the parameter and
    its moments, in this order, where these are 16-bit floats; None rounds to nearest."""

    param: Tensor
    grad: Tensor
    moments: tuple[Moment, ...]
    numbers: Numbers
    keys: tuple[int, ...] | None = None


def optimizer_step(rule: str, targets: list[ParamStep]) -> None:
    """Update parameters and moments in place, each by the best kernel that supports it. Empty parameters, which a
    process may have of a sharded one, are skipped."""
    plugins.load()
    taken: dict[Impl | None, list[ParamStep]] = {}
    for target in targets:
        if target.param.numel():
            impl, _ = first_that_takes(STEP, target.param.device.type, rule, target)
            taken.setdefault(impl, []).append(target)
    for impl, its in taken.items():
        if impl is not None:
            impl.run(rule, its)
            continue
        for target in its:
            generic(rule, target)


def generic(rule: str, target: ParamStep) -> None:
    """The generic kernel, which is the specification."""
    for part, first in _parts(target):
        _step(rule, part, first)


def _parts(target: ParamStep) -> Iterator[tuple[ParamStep, int]]:
    """Yield the target in pieces of whole rows, which end at block boundaries, each with its offset in elements."""
    param, moments = target.param.detach(), target.moments
    coded = next((moment.data.shape[0] for moment in moments if moment.format is not None), None)
    n = coded or (param.shape[0] if param.dim() > 1 else 1)
    k = param.numel() // n
    rows = max(1, PIECE // k)
    whole = type(param) is not Tensor or not all(each.is_contiguous() for each in (param, *(m.data for m in moments)))
    if rows >= n or whole:
        yield target, 0
        return
    param, grad = param.view(n, k), target.grad.reshape(n, k)
    for at in range(0, n, rows):
        some = slice(at, at + rows)
        own = tuple(
            moment._replace(
                data=moment.data.view(n, -1)[some], scale=None if moment.scale is None else moment.scale[some]
            )
            for moment in moments
        )
        yield dataclasses.replace(target, param=param[some], grad=grad[some], moments=own), at * k


def _step(rule: str, target: ParamStep, first: int) -> None:
    p, g = target.param.detach().to(torch.float32), target.grad.to(torch.float32)
    moments = [_read(moment, p.shape) for moment in target.moments]
    p, moments = _moved(rule, p, g, moments, target.numbers)
    keys = target.keys or (None,) * (1 + len(moments))
    with torch.no_grad():
        target.param.copy_(_rounded(p, target.param.dtype, keys[0], first))
    for moment, value, key in zip(target.moments, moments, keys[1:], strict=True):
        _write(moment, value, key, first)


def _moved(rule: str, p: Tensor, g: Tensor, moments: list[Tensor], n: Numbers) -> tuple[Tensor, list[Tensor]]:
    if n.sign != 1.0:
        g = -g
    if n.l2:
        g = g + p * n.l2
    if n.decay != 1.0:
        p = p * n.decay
    if rule == "adam":
        m = moments[0] * n.beta1 + g * n.rest1
        v = moments[1] * n.beta2 + g * g * n.rest2
        return p - m / (v.sqrt() * n.correction + n.eps) * n.rate, [m, v]
    if rule == "lion":
        mean = moments[0] * n.beta1 + g * n.rest1
        toward = mean.sign() + 0 * mean
        return p - toward * n.rate, [moments[0] * n.beta2 + g * n.rest2]
    if not moments:
        return p - g * n.rate, []
    m = moments[0] * n.beta1 + g * n.rest1
    return p - (g + m * n.beta1 if n.nesterov else m) * n.rate, [m]


def _read(moment: Moment, shape: torch.Size) -> Tensor:
    if moment.format is None or moment.scale is None:
        return moment.data.to(torch.float32)
    n = moment.data.shape[0]
    return dequantize_now(Quantized(moment.data, moment.scale), moment.format, n, shape.numel() // n).reshape(shape)


def _write(moment: Moment, value: Tensor, key: int | None, first: int) -> None:
    if moment.format is None or moment.scale is None:
        moment.data.copy_(_rounded(value, moment.data.dtype, key, first))
        return
    rows, number = value.reshape(moment.data.shape[0], -1), moment.format.number
    scale, _, _ = choose_qparams(rows, moment.format)
    scale = torch.where(scale > 0, scale.clamp(min=SMALLEST), scale)  # its reciprocal is finite
    steps = to_blocks(rows, moment.format.block) * spread(torch.ones_like(scale) / scale)
    codes = from_blocks(nearest_codes(steps, number), *rows.shape)
    if moment.positive and number.has_zero:
        zero = zero_code(number.table) if number.kind == "codebook" else 0
        codes = torch.where((rows > 0) & (codes == zero), zero + 1, codes)
    moment.data.copy_(to_storage(codes.to(torch.uint8), number))
    moment.scale.copy_(scale)


def _rounded(x: Tensor, dtype: torch.dtype, key: int | None, first: int) -> Tensor:
    return x.to(dtype) if key is None or dtype not in CUT else round_stochastically(x, dtype, place_bits(key, x, first))
