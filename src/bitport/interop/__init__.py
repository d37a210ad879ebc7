"""Checkpoints of others: quantized weights to and from their formats, number for number.

A format is a codec, a pair of small classes on dictionaries of tensors; :func:`convert` streams one checkpoint through
two of them.
"""

from bitport.interop.convert import Converted, convert
from bitport.interop.formats import READERS, WRITERS

__all__ = ["READERS", "WRITERS", "Converted", "convert"]
