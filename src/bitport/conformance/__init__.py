"""Does a device compute every op of bitport as its definition says? A suite that anyone runs on any device.

``python -m bitport.conformance --device cpu`` tries each op with its own samples in float32, bfloat16 and float16, and
compares with float64 on the CPU. The device may use whatever kernels it has; what ran is in the result.
"""

from bitport.conformance.matrix import support_table
from bitport.conformance.suite import Row, run

__all__ = ["Row", "run", "support_table"]
