"""linear_then and dyn_linear_then: y = f(x W^T + bias) * times, a matmul with its MLP epilogue in one op."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bitport.errors import ArgumentError
from bitport.ops import samples
from bitport.ops.select import declare
from bitport.ops.table import OPS, Op, Sample

FOLLOWING: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "silu": F.silu,
}
"""The functions f, by name."""


def follow(y: Tensor, then: str, times: Tensor | None) -> Tensor:
    y = FOLLOWING[then](y)
    return y if times is None else y * times


def _op(of: Op, count: int) -> Op:
    """The fused op of ``of``, which takes ``count`` arguments, and its epilogue."""

    def check(*args: Any) -> None:
        of.check(*args[:count])
        x, then, times = args[0], *args[count:]
        if then not in FOLLOWING:
            raise ArgumentError(f"unknown function {then!r} after a product; known: {', '.join(FOLLOWING)}")
        if times is not None:
            shape = (*x.shape[:-1], args[6])
            if times.shape != shape or times.dtype != x.dtype or times.device != x.device:
                given = f"{times.dtype} {[*times.shape]} on {times.device}"
                raise ArgumentError(f"times must be {x.dtype} {[*shape]} on {x.device}, as the result is, not {given}")

    def generic(*args: Any) -> Tensor:
        """The op, by its best kernel on the device, then the function, each rounded to x's dtype. A fused kernel rounds
        only once, at the end."""
        return follow(of.overload(*args[:count]), *args[count:])

    def decomposition(*args: Any) -> Tensor:
        return follow(of.generic(*args[:count]), *args[count:])

    return Op(
        f"{of.name}_then",
        of.schema.replace(") ->", ", str then, Tensor? times) ->"),
        check=check,
        generic=generic,
        fake=of.fake,
        samples=lambda device, dtype: _samples(of, device, dtype),
        rows_apart=lambda *args: of.rows_apart(*args[:count]),
        decomposition=decomposition,
        composed=True,
    )


def _samples(of: Op, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Samples of the op, each with one of the functions, every second with a factor. Those with NaN have no budget and
    are left out."""
    names = list(FOLLOWING)
    for at, sample in enumerate(each for each in of.samples(device, dtype) if not each.name.endswith("-nan")):
        then = names[at % len(names)]
        shape = (*sample.args[0].shape[:-1], sample.args[6])
        times = None
        if at % 2:
            times = torch.randn(shape, generator=samples.generator("times", *shape)).to(device, dtype)

        def expected(sample: Sample = sample, then: str = then, times: Tensor | None = times) -> Tensor:
            return follow(sample.expected(), then, None if times is None else times.cpu().double())

        k = sample.args[7]
        budget = _budget(sample.expected(), then, times, dtype, k)
        yield Sample(sample.name, (*sample.args, then, times), expected, budget)


def _budget(z: Tensor, then: str, times: Tensor | None, dtype: torch.dtype, k: int) -> float:
    """Least SQNR in dB of y = f(z) t. Errors of z (see samples) propagate to y by the slope of f, times t: those of the
    weight and of the sum scale with the RMS of z, that of rounding z with z itself. Two more roundings follow, and f
    itself, in float32, may be off by 2^-20. Each result has its own variance v, so the power of the error, a sum of
    squares, has a standard deviation of sqrt(2 sum v^2) around sum v; three of these are allowed for."""
    if not z.numel():
        return 0.0
    z = z.detach().clone().requires_grad_()
    with torch.enable_grad():
        y = FOLLOWING[then](z) if times is None else FOLLOWING[then](z) * times.cpu().double()
    (slope,) = torch.autograd.grad(y.sum(), z)
    z, y = z.detach(), y.detach()
    unit = 4.0 ** -samples.SIGNIFICAND[dtype]
    variance = (
        0.72**2 / 3 * ((unit + k * 4.0**-24) * slope**2 * z.square().mean() + unit * ((slope * z) ** 2 + 2 * y**2))
    )
    variance += 4.0**-20 * y**2
    spread = (2 * variance.square().sum()).sqrt() / variance.sum()
    return float(-10 * (variance.sum() / y.square().sum()).log10() - 3 * 4.34 * spread)


declare(_op(OPS["linear"], 12))
declare(_op(OPS["dyn_linear"], 14))
