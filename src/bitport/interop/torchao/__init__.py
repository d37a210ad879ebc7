"""Checkpoints of torchao: the JSON beside its tensors (header), the classes it describes (tensors and below), and as
which of them a scheme is written (forms)."""

from bitport.interop.torchao.reader import Reader
from bitport.interop.torchao.writer import Writer

__all__ = ["Reader", "Writer"]
