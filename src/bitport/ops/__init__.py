"""Computation: the op table, kernel selection, and the torch functions that QTensor implements with them."""

from bitport.missing import Missing, register_missing
from bitport.ops import (  # noqa: F401
    attention,
    convert,
    embedding,
    functional,
    grouped,
    int4pack_mm,
    linear,
    linear_then,
    quantized_matmul,
)
from bitport.ops.decompose import decompositions
from bitport.ops.select import (
    ENVIRONMENT,
    IMPLS,
    Decision,
    Impl,
    call,
    check_forced,
    decide,
    register_kernel,
    unregister_kernel,
    use_kernel,
)
from bitport.ops.table import OPS, Op, Sample
from bitport.ops.weight import Weight

check_forced(ENVIRONMENT)  # only here are all ops declared

__all__ = [
    "IMPLS",
    "OPS",
    "Decision",
    "Impl",
    "Missing",
    "Op",
    "Sample",
    "Weight",
    "call",
    "decide",
    "decompositions",
    "register_kernel",
    "register_missing",
    "unregister_kernel",
    "use_kernel",
]
