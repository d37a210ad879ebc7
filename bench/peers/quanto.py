"""optimum-quanto in eager mode."""

from __future__ import annotations

import copy

from optimum.quanto import freeze, qint4, qint8, quantize
from torch import Tensor, nn

from bench.peers.base import Prepared

PACKAGES = ("optimum-quanto",)
VARIANTS = {"int4": "4-bit", "int8": "8-bit"}
TYPES = {"int4": qint4, "int8": qint8}


def prepare(variant: str, weight: Tensor, group: int, copies: int) -> Prepared | str:
    n, k = weight.shape
    model = nn.Sequential(nn.Linear(k, n, bias=False, dtype=weight.dtype))
    model[0].weight = nn.Parameter(weight.clone(), requires_grad=False)
    quantize(model, weights=TYPES[variant])
    freeze(model)
    layer = model[0]
    bits = int(variant.removeprefix("int"))
    nbytes = n * k * bits // 8 + n * 2 if bits == 8 else n * k // 2 + 2 * n * (k // group) * 2
    every = [copy.deepcopy(layer) for _ in range(copies)]
    return Prepared(every, lambda: layer.weight.dequantize().double(), nbytes)
