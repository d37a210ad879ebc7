"""Checkpoints of torchao: the JSON that describes its tensors (header), the classes of these (tensors and below), and
the class in which a scheme is written (forms)."""

from bitport.interop.torchao.reader import Reader
from bitport.interop.torchao.writer import Writer

__all__ = ["Reader", "Writer"]
