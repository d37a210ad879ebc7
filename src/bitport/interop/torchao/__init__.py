"""Checkpoints of torchao: the JSON beside its tensors (header), and the classes it describes (tensors and below)."""

from bitport.interop.torchao.reader import Reader

__all__ = ["Reader"]
