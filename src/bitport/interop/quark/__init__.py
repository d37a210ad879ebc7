"""AMD Quark: the configuration of layers (settings), and their tensors (reader)."""

from bitport.interop.quark.reader import Reader

__all__ = ["Reader"]
