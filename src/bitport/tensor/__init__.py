"""QTensor, the quantized tensor subclass, and the torch operations it supports apart from matmuls."""

from bitport.tensor import aten, collectives, fsdp, join, methods, pickling  # noqa: F401  (fill QTensor's tables)
from bitport.tensor.parts import check_parts, matrix_of
from bitport.tensor.qtensor import ATEN, EXTRA, FUNCTIONS, PARTS, QTensor, from_parts, quantize_tensor

__all__ = [
    "ATEN",
    "EXTRA",
    "FUNCTIONS",
    "PARTS",
    "QTensor",
    "check_parts",
    "from_parts",
    "matrix_of",
    "quantize_tensor",
]
