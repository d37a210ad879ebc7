"""Enum values of the native kernels (``native/kernels/bitport_kernels.h``), and the decoding tables passed to them."""

from __future__ import annotations

import torch

from bitport.numerics import NUMBER_TYPES
from bitport.numerics.codec import values_of

INTEGER_ACTS = {"int8": 1, "int8-asym": 2, "int8-tensor": 3}
ACTS = {"": 0, **INTEGER_ACTS, "fp8": 4, "fp8-tensor": 5, "mxfp8": 6, "mxfp4": 7, "nvfp4": 8, "fp8-128": 9}
"""BitportAct: roundings of x that the kernels implement; integer ones only for integer weights."""
THEN = {"": 0, "gelu": 1, "gelu_tanh": 2, "silu": 3}
"""BitportThen: the functions that kernels apply to sums before rounding."""


def rounds(act: str, dtype: str) -> bool:
    """Whether the kernels implement the rounding ``act`` of x for weights of the number type ``dtype``."""
    return act in ACTS and (act not in INTEGER_ACTS or NUMBER_TYPES[dtype].kind == "int")


def meanings(dtype: str) -> list[float]:
    """The value of each code of a number type."""
    number = NUMBER_TYPES[dtype]
    values = values_of(torch.arange(1 << number.bits, dtype=torch.uint8, device="cpu"), number)
    return (values - number.midpoint if number.kind == "int" else values).tolist()
