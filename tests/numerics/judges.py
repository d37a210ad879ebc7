"""Small floats as ml_dtypes has them: by name, and one that bitport and torch do not have."""

import ml_dtypes

from bitport.numerics import NumberType

JUDGES = {
    "float8_e4m3": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float6_e2m3": ml_dtypes.float6_e2m3fn,
    "float6_e3m2": ml_dtypes.float6_e3m2fn,
    "float4_e2m1": ml_dtypes.float4_e2m1fn,
    "float8_e8m0": ml_dtypes.float8_e8m0fnu,
}
"""Of every float type in NUMBER_TYPES."""
NEW = NumberType("float8_e3m4", 8, "float", exponent_bits=3, mantissa_bits=4, bias=3, specials="ieee")
