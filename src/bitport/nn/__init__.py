"""Modules for those who build a layer from (in, out), and the walk that finds what can be quantized."""

from bitport.nn.linear import QuantizedLinear, swap_linears_
from bitport.nn.targets import find_targets

__all__ = ["QuantizedLinear", "find_targets", "swap_linears_"]
