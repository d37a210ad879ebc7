"""Conversion of quantized checkpoints from and to the formats of other libraries, without changing any number.

A format is a codec: a pair of small classes that work on dictionaries of tensors. :func:`convert` streams a checkpoint
through two of them.
"""

from bitport.interop.convert import Converted, convert
from bitport.interop.formats import READERS, WRITERS

__all__ = ["READERS", "WRITERS", "Converted", "convert"]
