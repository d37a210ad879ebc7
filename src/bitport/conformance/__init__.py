"""Conformance suite: check on any device that every op of bitport computes what its definition says.

``python -m bitport.conformance --device cpu`` runs each op on its own samples in float32, bfloat16 and float16, and
compares with float64 on the CPU. The device may use whatever kernels it has; the result names those that ran.
"""

from bitport.conformance.matrix import support_table
from bitport.conformance.suite import Row, run

__all__ = ["Row", "run", "support_table"]
