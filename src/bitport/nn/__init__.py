"""QuantizedLinear, a layer built from (in, out), and the search for quantizable weights of a model."""

from bitport.nn.linear import QuantizedLinear, swap_linears_
from bitport.nn.targets import find_targets

__all__ = ["QuantizedLinear", "find_targets", "swap_linears_"]
