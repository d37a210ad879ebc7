"""How the two products of a linear layer's backward pass are rounded: plain data, like schemes.

A scheme describes a product left x right^T over the last axis of both: ``act`` rounds the rows of the left factor, and
``weight`` is the format of the right one. A layer y = x W^T with x [M, K] and W [N, K] has three such products::

    forward                    x [M, K]    W [N, K]        the scheme of the layer
    gradient of the input      g [M, N]    W^T [K, N]      Gradients.input
    gradient of the weight     g^T [N, M]  x^T [K, M]      Gradients.weight

Scales therefore run along the reduction axis of each product, and W is rounded once along K and once along N.
"""

from __future__ import annotations

import dataclasses

from bitport.errors import SchemeError
from bitport.numerics import Format
from bitport.schemes import Scheme, preset


@dataclasses.dataclass(frozen=True)
class Gradients:
    """How the backward pass of a linear layer is rounded: the products that give the gradients of the input and of
    the weight.

    ``input``, ``weight``: the scheme of that product; None computes it in the dtype of the gradient, from the
    rounded numbers that the forward pass used."""

    input: Scheme | None = None
    weight: Scheme | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            scheme = getattr(self, field.name)
            if scheme is not None and (scheme.static or not scheme.act):
                raise SchemeError(
                    f"Gradients.{field.name}={scheme}: both factors of a gradient change in every step; "
                    f"give a scheme that rounds its input, by a scale that is measured"
                )


def _both(name: str) -> Gradients:
    return Gradients(preset(name), preset(name))


_E4M3_TENSOR = Format(dtype="float8_e4m3", block=(0, 0))
_WIDE = Scheme(weight=_E4M3_TENSOR, act="fp8-e5m2-tensor")
_ROWS_OF_128 = Scheme(weight=Format(dtype="float8_e4m3", block=(1, 128)), act="fp8-128")

GRADIENTS: dict[str, Gradients] = {
    # One scale per gradient tensor, which has a wider dynamic range than x and W: more exponent bits.
    "fp8": Gradients(_WIDE, _WIDE),
    "fp8-row": _both("fp8-row"),
    "fp8-row-input": Gradients(input=preset("fp8-row")),
    "fp8-block": Gradients(preset("fp8-block"), _ROWS_OF_128),
    "mxfp8": _both("mxfp8"),
    "int8": _both("int8-dyn"),
    "int8-input": Gradients(input=preset("int8-dyn")),
}
"""By name, for a forward pass in fp8, fp8-row, fp8-block, mxfp8 or int8-dyn. ``-input`` keeps the gradient of the
weight, a sum over all tokens of a batch that goes to the optimizer, in the dtype of the gradient."""


def gradients_of(spec: str | Gradients | None) -> Gradients | None:
    if spec is None or isinstance(spec, Gradients):
        return spec
    if spec not in GRADIENTS:
        raise SchemeError(f"unknown gradients {spec!r}; known: {', '.join(GRADIENTS)}, or a Gradients(input=, weight=)")
    return GRADIENTS[spec]
