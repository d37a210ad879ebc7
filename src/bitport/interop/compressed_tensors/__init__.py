"""Checkpoints of compressed-tensors: their config (arguments, groups) and their tensors (parts, codec)."""

from bitport.interop.compressed_tensors.codec import Reader, Writer

__all__ = ["Reader", "Writer"]
