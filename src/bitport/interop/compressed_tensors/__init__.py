"""Checkpoints of compressed-tensors: what its config says (arguments, groups), and its tensors (parts, codec)."""

from bitport.interop.compressed_tensors.codec import Reader, Writer

__all__ = ["Reader", "Writer"]
