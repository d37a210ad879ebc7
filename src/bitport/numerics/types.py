"""The table of number types: what a code of b bits can mean.

    int      value = code - zero            codes 0 .. 2^b - 1; without a zero point zero = `midpoint`
    float    [sign | exponent | mantissa]   (-1)^s * 2^(e - bias) * 1.m, subnormal 2^(1 - bias) * 0.m at e = 0
    codebook value = table[code]

`specials` says which float codes are not finite:

    none     every code is finite (fp4, fp6)
    nan      only the code with all exponent and mantissa bits set is NaN, there is no infinity (e4m3, e8m0)
    ieee     the largest exponent holds infinity (mantissa 0) and NaN (e5m2)
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from bitport.numerics.codebooks import BNB_FP4, GGML_IQ2, GGML_IQ3, GGML_IQ3S, GGML_IQ4, NF4
from bitport.numerics.dynamic import DYNAMIC4, DYNAMIC8, UDYNAMIC8, ULINEAR4

Kind = Literal["int", "float", "codebook"]
Specials = Literal["none", "nan", "ieee"]


@dataclass(frozen=True)
class NumberType:
    """A number type. `storage` is the dtype of packed data: torch's own for 8-bit floats, else uint8 holding a dense
    bit stream. `table`: the values of all codes of a codebook, in ascending order; equal ones may follow each other."""

    name: str
    bits: int
    kind: Kind
    exponent_bits: int = 0
    mantissa_bits: int = 0
    bias: int = 0
    specials: Specials = "none"
    storage: torch.dtype = torch.uint8
    table: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        codes = self.qmax + 1 if self.kind == "codebook" else 0
        if len(self.table) != codes or list(self.table) != sorted(self.table):
            raise ValueError(
                f"{self.name}: {self.kind} of {self.bits} bits has a table of {codes} values in ascending order, one "
                f"for each code, not {self.table}; values may repeat"
            )

    @property
    def qmax(self) -> int:
        """Largest code; the smallest is 0."""
        return (1 << self.bits) - 1

    @property
    def midpoint(self) -> float:
        """The zero of an integer type without a zero point: 2^(b-1), so the codes are two's complement with an offset.
        One bit has no code for zero: its midpoint 0.5 makes the two codes -1/2 and +1/2."""
        return float(1 << (self.bits - 1)) if self.bits > 1 else 0.5

    @property
    def signed(self) -> bool:
        """Whether the top bit of a float code is a sign (only e8m0 has none)."""
        return self.bits == 1 + self.exponent_bits + self.mantissa_bits

    @property
    def max_code(self) -> int:
        """Code of the largest finite value (sign bit clear)."""
        if self.kind != "float":
            return self.qmax
        top = (1 << (self.exponent_bits + self.mantissa_bits)) - 1
        return top - {"none": 0, "nan": 1, "ieee": 1 << self.mantissa_bits}[self.specials]

    @property
    def nan_code(self) -> int:
        """The NaN code (all bits but the sign set); 0, the code of zero, for float types without NaN."""
        return 0 if self.specials == "none" else (1 << (self.exponent_bits + self.mantissa_bits)) - 1

    @property
    def max(self) -> float:
        """The magnitude to which a symmetric scale maps the largest element. For integers this excludes code 0
        (-2^(b-1)), which has no positive counterpart."""
        if self.kind == "int":
            return self.qmax - self.midpoint
        return max(map(abs, self.table)) if self.kind == "codebook" else self.float_value(self.max_code)

    @property
    def smallest(self) -> float:
        """Smallest positive value."""
        if self.kind == "int":
            return self.max if self.bits == 1 else 1.0
        if self.kind == "codebook":
            return min(entry for entry in self.table if entry > 0)
        return self.float_value(1 if self.signed else 0)

    @property
    def has_zero(self) -> bool:
        """Whether some code means 0 when there is no zero point."""
        return 0.0 in self.table if self.kind == "codebook" else self.signed if self.kind == "float" else self.bits > 1

    @property
    def emax(self) -> int:
        """floor(log2(max)): the exponent of the largest value, as the OCP MX specification names it."""
        return math.frexp(self.max)[1] - 1

    def float_value(self, code: int) -> float:
        """Value of a finite code with the sign bit clear."""
        exponent, mantissa = code >> self.mantissa_bits, code & ((1 << self.mantissa_bits) - 1)
        if not self.signed:
            return 2.0 ** (exponent - self.bias)
        significand = mantissa + (1 << self.mantissa_bits if exponent else 0)
        return significand * 2.0 ** (max(exponent, 1) - self.bias - self.mantissa_bits)


def _float(
    exponent_bits: int,
    mantissa_bits: int,
    bias: int,
    specials: Specials = "none",
    storage: torch.dtype = torch.uint8,
) -> NumberType:
    sign_bits = 1 if mantissa_bits else 0
    bits = sign_bits + exponent_bits + mantissa_bits
    name = f"float{bits}_e{exponent_bits}m{mantissa_bits}"
    return NumberType(name, bits, "float", exponent_bits, mantissa_bits, bias, specials, storage)


NUMBER_TYPES: dict[str, NumberType] = {
    number.name: number
    for number in (
        # An integer's "mantissa" is the precision of its largest power of two: 64..127 have 6 bits below the first.
        *(NumberType(f"int{bits}", bits, "int", mantissa_bits=max(bits - 2, 0)) for bits in range(1, 9)),
        _float(4, 3, 7, "nan", torch.float8_e4m3fn),
        _float(5, 2, 15, "ieee", torch.float8_e5m2),
        _float(2, 3, 1),
        _float(3, 2, 3),
        _float(2, 1, 1),
        _float(8, 0, 127, "nan", torch.float8_e8m0fnu),
        NumberType("nf4", 4, "codebook", table=NF4),
        NumberType("bnb_fp4", 4, "codebook", table=BNB_FP4),
        NumberType("ggml_iq4", 4, "codebook", table=GGML_IQ4),
        NumberType("ggml_iq3", 4, "codebook", table=GGML_IQ3),
        NumberType("ggml_iq3s", 4, "codebook", table=GGML_IQ3S),
        NumberType("ggml_iq2", 4, "codebook", table=GGML_IQ2),
    )
}
"""By name: what codes can mean (docs/numerics.md)."""

STATE_TYPES: dict[str, NumberType] = {
    number.name: number
    for number in (
        NumberType("dynamic8", 8, "codebook", table=DYNAMIC8),
        NumberType("udynamic8", 8, "codebook", table=UDYNAMIC8),
        NumberType("dynamic4", 4, "codebook", table=DYNAMIC4),
        NumberType("ulinear4", 4, "codebook", table=ULINEAR4),
    )
}
"""Number types for optimizer moments. They are stored and read like the others, but matmuls do not accept them as
weights, so ops, kernels and named schemes need not support tables of 256 entries."""


def number_type(name: str | NumberType) -> NumberType:
    """The number type called ``name``; a NumberType is returned unchanged. Unknown names raise ValueError."""
    if isinstance(name, NumberType):
        return name
    number = NUMBER_TYPES.get(name) or STATE_TYPES.get(name)
    if number is None:
        raise ValueError(
            f"unknown number type {name!r}; the number types are {', '.join([*NUMBER_TYPES, *STATE_TYPES])}"
        )
    return number
