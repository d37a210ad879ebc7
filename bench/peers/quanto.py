"""optimum-quanto in eager mode."""

from __future__ import annotations

from optimum.quanto import freeze, qint4, qint8, quantize
from torch import Tensor, nn

from bench.peers.base import Prepared

PACKAGES = ("optimum-quanto",)
VARIANTS = {"int4": "4-bit", "int8": "8-bit"}
TYPES = {"int4": qint4, "int8": qint8}


def prepare(variant: str, weight: Tensor, group: int, copies: int) -> Prepared | str:
    n, k = weight.shape
    every = [_layer(weight, variant) for _ in range(copies)]
    scales = n if variant == "int8" else 2 * n * (k // group)
    nbytes = n * k * int(variant.removeprefix("int")) // 8 + 2 * scales
    return Prepared(every, lambda: every[0].weight.dequantize().double(), nbytes)


def _layer(weight: Tensor, variant: str) -> nn.Module:
    n, k = weight.shape
    model = nn.Sequential(nn.Linear(k, n, bias=False, dtype=weight.dtype))
    model[0].weight = nn.Parameter(weight.clone(), requires_grad=False)
    quantize(model, weights=TYPES[variant])
    freeze(model)
    return model[0]
