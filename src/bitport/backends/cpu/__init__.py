"""CPU: those of PyTorch's own ops that are faster than the generic kernel there."""

from bitport.backends.cpu import int8pack_mm, int_mm
from bitport.ops import Impl, register_kernel

register_kernel(Impl("linear", "int8pack_mm", "cpu", int8pack_mm.run, int8pack_mm.refuses))
register_kernel(Impl("dyn_linear", "int_mm", "cpu", int_mm.run, int_mm.refuses))
